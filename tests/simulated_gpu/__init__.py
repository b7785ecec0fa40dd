"""GPUs that exist only as a device type, in two ways.

    simulate(function, *arguments)        one process is rank 0 of many: torch's fake tensors on device `cuda`
    with simulated_gpus(ranks=8) as gpu:  inside of it: a fake process group, with a GPU per rank
        ...                               models, collectives, optimizer steps
        return gpu.peak, gpu.traffic      bytes alive at the peak, bytes of each collective

    run_ranks(function, 8, *arguments, nodes=2, device="cuda")    eight real processes over gloo: see ranks.py

The first computes nothing and no tensor has memory, so a step of a 7B model on 8 ranks takes less than a minute of one
core. Found this way: tensors of the CPU mixed with tensors of the GPU, wrong types and shapes, operators without a CUDA
kernel, what is alive at the peak, collectives and their bytes, places where the host waits for the GPU.

The second computes real numbers: kernels.cpp gives each operator on device `cuda` its CPU kernel, on the same memory.
Each rank runs its own code, so it also finds wrong numbers, ranks that enter collectives in different orders, ranks
that wait for one that does not come, and collectives on the wrong stream.

Neither finds bugs of CUDA's and NCCL's kernels, races of streams (all work is done when it is given), fragmentation,
memory that torch does not allocate (NCCL, cuBLAS, CUDA contexts and graphs, other processes), or deadlocks inside NCCL,
such as of two communicators that wait for each other's place on a GPU.
"""
