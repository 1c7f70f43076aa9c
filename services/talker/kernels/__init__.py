"""Triton kernels of the talker's steps on NVIDIA GPUs: what torch's operators take from two to twenty kernels for.

Each is an operator of torch (`torch.ops.quartet`), so that what traces or counts operators sees one. They allocate
nothing but their outputs, and the host reads no value: a CUDA graph can hold them. They round where torch's path does.
"""
