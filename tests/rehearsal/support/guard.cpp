// A device guard for "cuda" that does nothing. torch's CPU build has none, so indexing a fake CUDA tensor fails there.
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
