"""What a mod captures: a tensor or a number."""

from __future__ import annotations

import torch

Value = torch.Tensor | int | float | bool
