"""GPUs that exist only as a device type: torch's fake tensors on device `cuda`, and a fake process group of many ranks.

    simulate(function, *arguments)       runs a scenario in a process of its own and returns its result
    with simulated_gpus(ranks=8) as gpu:  inside a scenario: this process is rank 0 of 8, with a GPU each
        ...                               models, collectives, optimizer steps
        return gpu.peak, gpu.traffic      bytes alive at the peak, bytes of each collective

Nothing is computed and no tensor has memory, so a step of a 7B model on 8 ranks takes less than a minute of one core.

Found this way: tensors of the CPU mixed with tensors of the GPU, wrong types and shapes, operators without a CUDA
kernel, what is alive at the peak, collectives and their bytes, places where the host waits for the GPU.
Not found: wrong numbers, bugs of kernels, races of streams, deadlocks (only rank 0 exists), fragmentation, and memory
that torch does not allocate (NCCL, cuBLAS, CUDA contexts and graphs, other processes).
"""
