"""Gradient averaging in fp32 for DistributedDataParallel."""

# No `from __future__ import annotations`: DistributedDataParallel checks the hook's annotations, which must be types.

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_in_fp32(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP that averages gradients in fp32, whatever their dtype, as MeshStrategy does.

    Lightning's DDPStrategy(ddp_comm_hook=...) installs the hook on GPUs only.
    """
    gradients = bucket.buffer()  # (n,): the flattened gradients of a bucket
    wide = gradients.float() / dist.get_world_size()  # (n,) fp32
    future = dist.all_reduce(wide, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))
