"""Gradients in memory of their own."""

from __future__ import annotations

import torch

from autopar.runtime.owned import Owned


def test_parts_of_a_bucket_stay_where_they_are_and_what_is_shared_is_copied() -> None:
    held, bucket = torch.ones(4), torch.arange(6.0)
    owned = Owned([held])
    first, second = bucket[:2], bucket[2:]
    assert owned.own(first) is first and owned.own(second) is second
    for shared in (held, held[1:2], second, bucket[1:3]):
        copied = owned.own(shared)
        assert copied is not shared and torch.equal(copied, shared)
        copied.zero_()
    assert torch.equal(bucket, torch.arange(6.0)) and torch.equal(held, torch.ones(4))


def test_what_is_held_later_is_copied_too() -> None:
    owned, tangent = Owned(), torch.ones(())
    owned.hold(tangent)
    assert owned.own(tangent) is not tangent
