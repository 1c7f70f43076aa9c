"""Context parallelism: several devices share the sequence of each denoising call, by diffusers' own implementation.

diffusers wants a process per device, all of which make the same calls. The pipeline runs in the first process (rank 0);
the others hold the denoisers, and repeat each call of rank 0's engine. Only `services.dit.__main__` imports this, where
the settings ask for it.
"""
