"""A CPU backend of Triton in name only: with TRITON_INTERPRET=1 Triton runs kernels in Python and compiles nothing.

With the directory above on PYTHONPATH, vLLM finds this backend by its entry point, and so takes its V2 model runner on
a CPU too, as it does on a GPU: `make test-v2`. Greedy requests only: the interpreter cannot run vLLM's kernel of top_k
and top_p (`'int' object has no attribute 'to'`).
"""
