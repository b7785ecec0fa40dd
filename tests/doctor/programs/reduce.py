"""Adds up the ranks: a torchrun program that ends well."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print(f"the ranks add up to {total.item():.0f}")
dist.destroy_process_group()
