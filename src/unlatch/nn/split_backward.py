"""A backward pass in two true halves: first gradients of the inputs, later gradients of the parameters.

Sort the nodes of the autograd graph by where their edges lead. Those that lead to an input form the *trunk*; those that
lead to parameters only hang off the trunk as *twigs*:

    output -- conv2 -- relu -- conv1 -- input        trunk: executed by the first half
                |                |
              weight2          weight1               twigs: executed by the second half

The first half runs the engine towards the inputs, so it computes no weight gradient; on the way it notes the gradient
that arrives at each trunk node with a twig. The second half starts the engine at each of these nodes, towards the
parameters of its twigs, so nothing else of the trunk runs again.

A twig that hangs on several trunk nodes (a weight used twice) needs care: started at one of them, the engine would also
find the other by way of the trunk, and count it again. There, the second half stops the engine right after the trunk
node, collects what it sent into such twigs, and passes all of that through them at once.

Scale and shift of normalisation layers are the exception: their gradients fall out of the sums that the gradient of the
input needs anyway, so the first half takes them along, and the second only adds them.

Hooks on parameters run once, in the second half. Hooks on intermediate tensors may run in both halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..errors import CheckpointMismatch

__all__ = ["Pending", "input_gradients"]

Gradients: TypeAlias = tuple[Tensor | None, ...]
Flow: TypeAlias = tuple[GradientEdge, Tensor]

# torch 2.6 takes edges in autograd.grad, but not yet in autograd.backward.
_EDGES_IN_BACKWARD = torch.__version__ >= "2.7"

_NORMS = ("BatchNormBackward", "LayerNormBackward", "GroupNormBackward", "RmsNormBackward")


def input_gradients(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
) -> tuple[list[Tensor | None], Pending]:
    """The first half of a backward pass.

    **Arguments:**

    - `outputs`: tensors computed from `inputs` and `params`; those that do not require a gradient are skipped.
    - `grads`: the gradient of each output. As in `torch.autograd.backward`, `None` is 1 for a scalar, such as a loss.
    - `inputs`: leaf tensors; those that do not require a gradient are skipped.
    - `params`: leaf tensors whose gradients the second half accumulates.

    **Returns:**

    The gradient of each input, `None` where there is none, and what remains to be done. Until that is done, neither
    `grads` nor the returned gradients may be written to: they are needed again, and may share memory.

    >>> x, w = torch.tensor([3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    >>> grads, pending = input_gradients([x * w], [None], [x], [w])
    >>> grads, w.grad
    ([tensor([2.])], None)
    >>> pending.weight_gradients()
    >>> w.grad
    tensor([3.])
    """
    flows = [
        (get_gradient_edge(output), _gradient(output, grad))
        for output, grad in zip(outputs, grads, strict=True)
        if output.requires_grad
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    ends = [get_gradient_edge(tensor) for tensor in wanted]
    graph = _explore([edge.node for edge, _ in flows], {end.node for end in ends}, {id(param) for param in params})

    above = [flow for flow in flows if flow[0].node in graph.trunk]
    pending = Pending(graph, [flow for flow in flows if flow[0].node in graph.twigs])
    found: dict[int, Tensor | None] = {}
    if above:
        handles = [node.register_prehook(partial(pending.note, node)) for node in graph.holders]
        try:
            results = torch.autograd.grad(
                [edge for edge, _ in above],
                [*ends, *graph.byproducts],
                [grad for _, grad in above],
                retain_graph=bool(handles),
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        found = {id(tensor): grad for tensor, grad in zip(wanted, results, strict=False)}
        pending.take(zip(graph.byproducts, results[len(wanted) :], strict=True))
    return [found.get(id(tensor)) for tensor in inputs], pending


def _gradient(output: Tensor, grad: Tensor | None) -> Tensor:
    if grad is not None:
        return grad
    if output.numel() != 1:
        raise RuntimeError(f"an output of shape {tuple(output.shape)} needs a gradient; only a scalar may have None")
    return torch.ones_like(output)


@dataclass
class _Graph:
    """What the walk over the autograd graph finds. Nodes are listed with those nearest the outputs first."""

    edges: dict[Node, list[tuple[Node | None, int]]] = field(default_factory=dict)
    trunk: set[Node] = field(default_factory=set)
    twigs: set[Node] = field(default_factory=set)
    #: Parameters whose gradients the trunk gives away.
    byproducts: list[GradientEdge] = field(default_factory=list)
    #: Trunk nodes with a twig.
    holders: list[Node] = field(default_factory=list)
    #: Parameters of the twigs that hang on one holder alone, if all twigs of this holder do.
    own: dict[Node, list[Tensor]] = field(default_factory=dict)
    #: All other parameters that are reached.
    shared: list[Tensor] = field(default_factory=list)

    def twigs_of(self, holder: Node) -> list[tuple[int, Node, int]]:
        """Edges into twigs: position among the edges of the holder, the twig, and which of its gradients."""
        edges = enumerate(self.edges[holder])
        return [(position, node, nr) for position, (node, nr) in edges if node is not None and node in self.twigs]


def _explore(roots: Sequence[Node], ends: set[Node], params: set[int]) -> _Graph:
    graph = _Graph()
    leaves: dict[Node, Tensor] = {}
    order: list[Node] = []  # a node comes after all that it leads to
    todo: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
            targets = {target for target, _ in graph.edges[node]}
            if node in ends or not graph.trunk.isdisjoint(targets):
                graph.trunk.add(node)
            elif node in leaves or not graph.twigs.isdisjoint(targets):
                graph.twigs.add(node)
        elif node not in graph.edges:
            # Edges that lead nowhere keep their place, for the engine's answers are in this order.
            following = [] if node in ends else list(node.next_functions)
            graph.edges[node] = following
            variable = None if following else getattr(node, "variable", None)
            if variable is not None and id(variable) in params:
                leaves[node] = variable
            todo.append((node, True))
            todo += [(target, False) for target, _ in following if target is not None]
    order.reverse()
    _set_byproducts_apart(graph, order, leaves, set(roots))
    graph.holders = [node for node in order if node in graph.trunk and graph.twigs_of(node)]
    _assign(graph, order, leaves, set(roots))
    return graph


def _set_byproducts_apart(graph: _Graph, order: Sequence[Node], leaves: dict[Node, Tensor], roots: set[Node]) -> None:
    # A hook on the parameter would run when the gradient is computed and again when it is added.
    spared = {node for node, variable in leaves.items() if node not in roots and not variable._backward_hooks}
    for node in order:
        if spared and not (node in graph.trunk and any(norm in node.name() for norm in _NORMS)):
            spared.difference_update(target for target, _ in graph.edges[node] if target is not None)
    for node in [leaf for leaf in leaves if leaf in spared]:
        graph.twigs.remove(node)
        graph.byproducts.append(GradientEdge(node, 0))
        graph.shared.append(leaves.pop(node))


def _assign(graph: _Graph, order: Sequence[Node], leaves: dict[Node, Tensor], roots: set[Node]) -> None:
    """Say which holder each parameter belongs to, if it is one alone."""
    owner: dict[Node, Node | None] = {node: None for node in roots if node in graph.twigs}
    for node in order:
        if node in graph.trunk or node in graph.twigs:
            source = node if node in graph.trunk else owner[node]
            for target, _ in graph.edges[node]:
                if target is not None and target in graph.twigs and owner.setdefault(target, source) is not source:
                    owner[target] = None
    # A holder is on its own only if nobody else reaches anything below it.
    tangled = {node for node in graph.twigs if owner[node] is None}
    for node in reversed(order):
        if node in graph.twigs and not tangled.isdisjoint(target for target, _ in graph.edges[node]):
            tangled.add(node)
    for holder in graph.holders:
        if tangled.isdisjoint(twig for _, twig, _ in graph.twigs_of(holder)):
            graph.own[holder] = []
    for node, variable in leaves.items():
        only = owner[node]
        (graph.shared if only is None else graph.own.get(only, graph.shared)).append(variable)


class Pending:
    """The second half of a backward pass, to be done once, at any later time before the parameters change."""

    def __init__(self, graph: _Graph, flows: list[Flow]) -> None:
        self._graph: _Graph | None = graph
        self._flows = flows
        self._noted: list[tuple[Node, Gradients]] = []

    def note(self, node: Node, grads: Gradients) -> None:
        """Keep the gradients that arrive at a node."""
        self._noted.append((node, grads))

    def take(self, byproducts: Iterable[tuple[GradientEdge, Tensor | None]]) -> None:
        """Keep gradients that are computed already and wait to be added."""
        self._flows += [(edge, grad) for edge, grad in byproducts if grad is not None]

    def state(self) -> dict[str, Any]:
        """The gradients that wait, to be given to the second half of an equal graph."""
        return {"noted": [list(grads) for _, grads in self._noted], "flows": [grad for _, grad in self._flows]}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the gradients that another second half of an equal graph returned from `state`."""
        noted, flows = state["noted"], state["flows"]
        shapes = [[getattr(g, "shape", None) for g in grads] for grads in noted]
        own = [[getattr(g, "shape", None) for g in grads] for _, grads in self._noted]
        if shapes != own or len(flows) != len(self._flows):
            raise CheckpointMismatch(
                f"second half of a backward: expected gradients of shapes {own} and {len(self._flows)} more, got "
                f"{shapes} and {len(flows)} more: the state was saved from another graph"
            )
        self._noted = [(node, tuple(grads)) for (node, _), grads in zip(self._noted, noted, strict=True)]
        self._flows = [(edge, grad) for (edge, _), grad in zip(self._flows, flows, strict=True)]

    def weight_gradients(self) -> None:
        """Accumulate the gradients of the parameters into their `.grad`."""
        graph, noted, flows = self._graph, self._noted, self._flows
        if graph is None:
            raise RuntimeError("weight_gradients() was called before: each backward pass has one second half")
        self._graph, self._noted, self._flows = None, [], []
        for node, grads in noted:
            arriving = [(GradientEdge(node, nr), grad) for nr, grad in enumerate(grads) if grad is not None]
            if not arriving:
                continue
            if node in graph.own:
                _accumulate(arriving, graph.own[node])
            else:
                flows += _into_twigs(arriving, node, graph.twigs_of(node))
        if flows:
            _accumulate(flows, graph.shared)


def _accumulate(flows: Sequence[Flow], params: Sequence[Tensor]) -> None:
    edges, grads = [edge for edge, _ in flows], [grad for _, grad in flows]
    if _EDGES_IN_BACKWARD:
        torch.autograd.backward(edges, grads, inputs=params)
        return
    results = torch.autograd.grad(edges, params, grads, allow_unused=True)
    reached = [(param, grad) for param, grad in zip(params, results, strict=True) if grad is not None]
    torch.autograd.backward([param for param, _ in reached], [grad for _, grad in reached])


class _Stop(Exception):
    """No error: it ends the engine's walk where we want it to end."""


def _into_twigs(arriving: Sequence[Flow], holder: Node, twigs: Sequence[tuple[int, Node, int]]) -> list[Flow]:
    """Run one trunk node alone, and return the gradients that it sends into its twigs."""
    sent: list[Flow] = []

    def stop(grad_inputs: Gradients, _: Gradients) -> None:
        for position, twig, nr in twigs:
            grad = grad_inputs[position]
            if grad is not None:
                sent.append((GradientEdge(twig, nr), grad))
        raise _Stop

    handle = holder.register_hook(stop)
    try:
        torch.autograd.grad(
            [edge for edge, _ in arriving],
            [GradientEdge(twig, nr) for _, twig, nr in twigs],
            [grad for _, grad in arriving],
            retain_graph=True,
            allow_unused=True,
        )
    except _Stop:
        pass
    finally:
        handle.remove()
    return sent
