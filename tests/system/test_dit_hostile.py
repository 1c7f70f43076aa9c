"""As test_hostile.py: whoever reaches a diffusion stage's port can send it anything."""

import pytest

from tests.hostile.stages import attacked
from tests.system.conftest import DitSystems

pytestmark = pytest.mark.e2e


@pytest.mark.long
async def test_no_field_of_a_request_is_more_than_a_dit_can_refuse(dit_systems: DitSystems):
    await attacked(dit_systems.get("sd3"), "dit", slice(None))


async def test_some_fields_are_no_more_than_a_dit_can_refuse(dit_systems: DitSystems):
    await attacked(dit_systems.get("sd3"), "dit", slice(1, None, 17))
