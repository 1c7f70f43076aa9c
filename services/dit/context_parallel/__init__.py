"""Context parallelism: several devices share the sequence of each denoising call, by diffusers' own implementation.

It wants a process per device. The pipeline runs in rank 0; the others hold the denoisers and repeat its calls. Only
`services.dit.__main__` imports this package, if the settings ask for it.
"""
