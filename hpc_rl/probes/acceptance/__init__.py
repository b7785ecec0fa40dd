"""The checks of `hpc-rl doctor --train`: the product's own training, generation and weight transfers, run once.

Start reading at `table.py`. Most checks run on torchrun's ranks (`on_ranks.py`), the others on a Ray cluster
(`on_ray.py`).
"""
