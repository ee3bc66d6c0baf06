"""Trellis codes: a number stands for a level by its own few bits and by those of the numbers before it.

So a number of ``bits`` bits has not 2 ** bits levels but 2 ** ``WINDOW``, and a choice of 2 ** bits of them, the
numbers before it given (Ungerboeck 1982; Marcellin and Fischer 1990). The codes of least error are found by Viterbi's
algorithm. A block is closed to a ring: before its first number comes its last (tail-biting), so no number has fewer
levels than others. All arithmetic is in integers.
"""

import torch
from torch import Tensor

from dofla.attention.constants import BRANCHES, FINE, NOWHERE, WINDOW


def windows(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] below 2 ** bits, each with those before it in higher bits: [..., n] below 2 ** WINDOW."""
    found = codes.int()
    for back in range(1, -(-WINDOW // bits)):
        found = found | codes.roll(back, -1).int() << back * bits
    return found & 2**WINDOW - 1


def search(x: Tensor, levels: Tensor, bits: int) -> Tensor:
    """Codes [..., n], uint8, whose ``levels`` [2 ** WINDOW], integers, are close to integers ``x`` in 1 / ``FINE``.

    First a path from anywhere, begun half a block before, says in which state the block begins and ends; then it is the
    path of least squared error of those that do. (At two bits, that leaves 2 % more error than to try all states.)
    """
    rows, length = x.int().flatten(0, -2), x.shape[-1]
    half, states = length // 2, 2 ** (WINDOW - bits)
    slope = -2 * BRANCHES * levels.int()
    came_by = torch.arange(2**WINDOW, dtype=torch.int32, device=x.device) // states
    costs = BRANCHES * FINE * levels.int().square() + came_by  # less x², and FINE times

    def walk(rows: Tensor, cost: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The cost of the best path to each state [blocks, states], and for each number the branch on which the path to
        each state came [blocks, states]."""
        ways = []
        for numbers in rows.unbind(-1):
            # A window is a state and below it the new code; its lower bits are the next state.
            total = torch.addcmul(costs, numbers.unsqueeze(-1), slope).unflatten(-1, (states, -1)) + cost.unsqueeze(-1)
            least = total.flatten(1).unflatten(-1, (-1, states)).amin(1)
            ways.append(least & BRANCHES - 1)
            cost = least - ways[-1]
        return cost, ways

    def back(state: Tensor, ways: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The state before, and the windows, of the paths that end in ``state`` [blocks, 1]."""
        found = []
        for way in reversed(ways):
            found.append(way.gather(1, state) * states + state)
            state = (found[-1] >> bits).long()
        return state, found[::-1]

    order = torch.arange(states, dtype=torch.int32, device=x.device)
    cost, ways = walk(rows.roll(-half, -1), rows.new_zeros(len(rows), states))
    end = (cost + order).amin(1, keepdim=True) & BRANCHES - 1
    state, _ = back(end.long(), ways[length - half :])
    _, ways = walk(rows, torch.where(order == state, 0, NOWHERE).int())
    _, found = back(state, ways)
    return (torch.cat(found, 1) & 2**bits - 1).to(torch.uint8).view(x.shape)
