"""What hpc-rl uses of vLLM, checked against vLLM's own classes without a GPU.

`python -m tests.vllm_wheels` (make test-vllm-api) checks the wheels for GPUs; tests/rl/test_vllm_contract.py checks the
installed vLLM. The files are not called test_*, because importing vLLM changes a process.
"""
