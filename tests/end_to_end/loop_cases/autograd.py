"""Loops that use more of autograd than `loss.backward()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.loop_cases.environments import Environment
from tests.end_to_end.loop_cases.fragments import STEPS, adam, mse, net, numbers, samples, seeded, sgd, train
from tests.end_to_end.loop_cases.gradients import set_by_hand
from tests.end_to_end.loop_cases.table import Expected, Numbers, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER
BY_HAND = "no backward pass tells that these gradients are of one worker's samples"


# ---- gradients of inputs


@case()
def adversarial_examples(env: Environment) -> Numbers:
    """FGSM: training on inputs moved along the sign of the loss's gradient, by `autograd.grad`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(mse(model, x, y), x)
        return mse(model, (x + 0.1 * slope.sign()).detach(), y)

    return train(env, model, optimizer, loss_of=loss_of)


@case(steps=ABSENT, why="zero_grad in the middle of a step would discard the micro-batches before")
def adversarial_examples_by_backward(env: Environment) -> Numbers:
    """The same by `backward`, whose gradients of weights are discarded."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            x.requires_grad_()
            mse(model, x, y).backward()
            moved = (x + 0.1 * x.grad.sign()).detach()
            optimizer.zero_grad()
            mse(model, moved, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return numbers(model, optimizer)


@case()
def adversarial_examples_in_several_steps(env: Environment) -> Numbers:
    """PGD: three steps, in evaluation mode."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        moved = x.clone()
        model.eval()
        for _ in range(3):
            moved.requires_grad_()
            (slope,) = torch.autograd.grad(mse(model, moved, y), moved)
            moved = (moved + 0.05 * slope.sign()).detach()
        model.train()
        return mse(model, moved, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def input_gradient_penalty(env: Environment) -> Numbers:
    """The squared gradient of each input is part of the loss (double backward)."""
    model = net()
    model, optimizer = env.bind(model, adam(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, y) + 0.1 * slope.square().sum(1).mean()

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def weight_gradient_penalty(env: Environment) -> Numbers:
    """The squared gradient of the weights is part of the loss, on each share by itself (double backward)."""
    model = net()
    model, optimizer = env.bind(model, adam(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        def of_share(_: int, x: Tensor, y: Tensor) -> Tensor:
            loss = mse(model, x, y)
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            return loss + 0.1 * torch.stack([s.square().sum() for s in slopes]).sum()

        return env.share_mean(of_share, x, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def forces_are_fitted(env: Environment) -> Numbers:
    """The output is an energy, and its negative gradient is fitted too."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, adam(model))

    def loss_of(model: nn.Module, x: Tensor, energy: Tensor, force: Tensor) -> Tensor:
        x.requires_grad_()
        found = model(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return F.mse_loss(found, energy) + F.mse_loss(-slope, force)

    return train(env, model, optimizer, loss_of=loss_of, data=samples("x", "y", "pair"))


# ---- gradients that do not come from `backward`


@case(own=EITHER, steps=EITHER, why=BY_HAND)
def autograd_grad_assigned(env: Environment) -> Numbers:
    """`autograd.grad` computes gradients, and the loop writes them into `p.grad`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            found = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
            before = [0 if p.grad is None else p.grad for p in model.parameters()]
            set_by_hand(list(model.parameters()), [a + b for a, b in zip(before, found, strict=True)])
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=ABSENT, why=BY_HAND)
def functional_grad_assigned(env: Environment) -> Numbers:
    """`torch.func.grad` computes gradients, and the loop writes them into `p.grad`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, values, (x,)), y)

    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            found = grad(loss_of)({n: p.detach() for n, p in model.named_parameters()}, x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = found[name]
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=ABSENT, why=BY_HAND)
def gradients_of_each_sample(env: Environment) -> Numbers:
    """DP-SGD: the gradient of each sample is clipped, and the mean is written into `p.grad`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, values, (x[None],)), y[None])

    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            values = {n: p.detach() for n, p in model.named_parameters()}
            found = vmap(grad(loss_of), in_dims=(None, 0, 0))(values, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factor = (0.5 / norms).clamp(max=1.0)
            for name, parameter in model.named_parameters():
                parameter.grad = torch.einsum("n,n...->...", factor, found[name]) / len(x)
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=ABSENT, why=BY_HAND)
def reptile(env: Environment) -> Numbers:
    """Reptile: the way that a copy of the weights goes in three steps is the gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, lr=1.0, momentum=0.0))
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            ways = []
            for _, share in env.shares(x, y):
                fast = net()
                fast.load_state_dict({n: p.detach().clone() for n, p in model.state_dict().items()})
                inner = sgd(fast, momentum=0.0)
                for _ in range(3):
                    inner.zero_grad()
                    mse(fast, *share).backward()
                    inner.step()
                ways.append([p.detach() - q.detach() for p, q in zip(model.parameters(), fast.parameters())])
            set_by_hand(list(model.parameters()), [torch.stack(each).mean(0) for each in zip(*ways, strict=True)])
        optimizer.step()
    return numbers(model)


@case()
def functional_forward(env: Environment) -> Numbers:
    """The forward pass is `functional_call` with the model's own parameters."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return train(
        env, model, optimizer,
        loss_of=lambda m, x, y: F.mse_loss(functional_call(m, dict(m.named_parameters()), (x,)), y),
    )  # fmt: skip


@case(steps=EITHER, why="the first forward pass has other tensors in place of the parameters")
def meta_learning(env: Environment) -> Numbers:
    """MAML: one inner step on half of each share, and backward through it from the other half."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: env.share_mean(_meta_loss(m, second=True), x, y))


@case(steps=EITHER, why="the first forward pass has other tensors in place of the parameters")
def meta_learning_of_first_order(env: Environment) -> Numbers:
    """First-order MAML: the inner gradient is a constant."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: env.share_mean(_meta_loss(m, second=False), x, y))


def _meta_loss(model: nn.Module, second: bool) -> Any:
    def loss_of(_: int, x: Tensor, y: Tensor) -> Tensor:
        support, query = slice(0, len(x) // 2), slice(len(x) // 2, None)
        values = dict(model.named_parameters())
        slopes = torch.autograd.grad(mse(model, x[support], y[support]), list(values.values()), create_graph=second)
        fast = {name: p - 0.1 * slope for (name, p), slope in zip(values.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, fast, (x[query],)), y[query])

    return loss_of


# ---- backward passes of other kinds


@case()
def retain_graph(env: Environment) -> Numbers:
    """Two losses of one forward pass, each with a backward pass of its own."""
    model = net(5, 8, 2)
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y", "other"), STEPS):
        optimizer.zero_grad()
        for x, y, other in batch:
            output = model(x)
            F.mse_loss(output[:, :1], y).backward(retain_graph=True)
            F.mse_loss(output[:, 1:], other).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def several_losses_in_one_backward(env: Environment) -> Numbers:
    """`torch.autograd.backward` of two losses."""
    model = net(5, 8, 2)
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y", "other"), STEPS):
        optimizer.zero_grad()
        for x, y, other in batch:
            output = model(x)
            torch.autograd.backward([F.mse_loss(output[:, :1], y), F.mse_loss(output[:, 1:], other)])
        optimizer.step()
    return numbers(model, optimizer)


@case()
def backward_from_the_output(env: Environment) -> Numbers:
    """The gradient of the output is computed by hand, and given to `output.backward`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            output = model(x)
            output.backward(2 * (output.detach() - y) / len(x))
        optimizer.step()
    return numbers(model, optimizer)


@case(find_unused=True)
def backward_into_some_parameters(env: Environment) -> Numbers:
    """`backward(inputs=...)` leaves the other parameters without a gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, weight_decay=0.1))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward(inputs=list(model[2].parameters()))
        optimizer.step()
    return numbers(model, optimizer)


@case()
def checkpointed(env: Environment) -> Numbers:
    """Activations are computed again, without reentrant backward."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=_checkpointed_loss(reentrant=False))


@case()
def checkpointed_reentrant(env: Environment) -> Numbers:
    """Activations are computed again in a nested backward pass."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=_checkpointed_loss(reentrant=True))


def _checkpointed_loss(reentrant: bool) -> Any:
    def loss_of(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()  # else reentrant backward finds nothing to compute
        hidden = checkpoint(lambda x: model[:3](x), x, use_reentrant=reentrant)
        return F.mse_loss(model[3:](hidden), y)

    return loss_of


class CheckpointedBlocks(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self._reentrant = nn.Linear(5, 8), nn.Linear(8, 1), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self._reentrant)
        return self.last(x)


@case()
def checkpointed_blocks(env: Environment) -> Numbers:
    """A model with checkpointed blocks inside."""
    model = seeded(0, lambda: CheckpointedBlocks(reentrant=False))
    return train(env, *env.bind(model, adam(model)))


@case()
def checkpointed_blocks_reentrant(env: Environment) -> Numbers:
    """The same with reentrant backward."""
    model = seeded(0, lambda: CheckpointedBlocks(reentrant=True))
    return train(env, *env.bind(model, adam(model)))


@case()
def offloaded_activations(env: Environment) -> Numbers:
    """Activations are packed and unpacked by `saved_tensors_hooks`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
            return mse(model, x, y)

    return train(env, model, optimizer, loss_of=loss_of)


# ---- functions and hooks


class Sign(torch.autograd.Function):
    """The sign, whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


@case()
def straight_through(env: Environment) -> Numbers:
    """A function of one's own with an invented gradient."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m[2:](Sign.apply(m[:2](x))), y))


@case()
def domain_adversarial(env: Environment) -> Numbers:
    """DANN: features are to predict the class and not the domain, through a reversed gradient."""
    features, classes, domain = net(5, 8), net(8, 3, seed=1), net(8, 1, seed=2)
    optimizer = adam(features, classes, domain)
    features, classes, domain, optimizer = env.bind(features, classes, domain, optimizer)
    for batch in env.batches(samples("x", "label", "y"), STEPS):
        optimizer.zero_grad()
        for x, label, y in batch:
            hidden = features(x)
            other = F.mse_loss(domain(Reversed.apply(hidden)), y)
            (F.cross_entropy(classes(hidden), label) + other).backward()
        optimizer.step()
    return numbers(features, classes, domain, optimizer)


@case()
def hook_on_an_activation(env: Environment) -> Numbers:
    """`register_hook` halves the gradient of a hidden tensor."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:2](x)
        hidden.register_hook(lambda gradient: 0.5 * gradient)
        return F.mse_loss(model[2:](hidden), y)

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def hook_on_a_parameter_before_bind(env: Environment) -> Numbers:
    """`register_hook` on a parameter scales its gradient."""
    model = net()
    model[0].weight.register_hook(lambda gradient: 0.25 * gradient)
    return train(env, *env.bind(model, sgd(model)))


@case()
def hook_on_a_parameter_after_bind(env: Environment) -> Numbers:
    """The same hook, made later: a mask of which weights train."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    mask = (torch.arange(40).view(8, 5) % 3 > 0).double()
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return train(env, model, optimizer)


@case()
def backward_hook_of_a_module(env: Environment) -> Numbers:
    """`register_full_backward_hook` changes what flows to the layers below."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, sgd(model))
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return train(env, model, optimizer)


@case()
def forward_hooks_of_modules(env: Environment) -> Numbers:
    """Forward hooks change inputs and outputs; one of them is removed after a step."""
    model = net(5, 8, 8, 1)
    model, optimizer = env.bind(model, sgd(model))
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
    handle = model[2].register_forward_hook(lambda module, inputs, output: output + 0.1)
    return train(env, model, optimizer, after_step=handle.remove)


@case()
def features_from_a_hook(env: Environment) -> Numbers:
    """A forward hook keeps the hidden tensor for an auxiliary loss."""
    model, kept = net(), []
    model, optimizer = env.bind(model, sgd(model))
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(output))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + 0.1 * kept.pop().square().mean()

    return train(env, model, optimizer, loss_of=loss_of)


@case(own=EITHER, steps=ABSENT, why="within backward, the mean over workers is not there yet")
def step_inside_backward(env: Environment) -> Numbers:
    """Each parameter has an optimizer of its own, whose step a hook takes during backward."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    model, *_ = env.bind(model, *optimizers.values())

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            mse(model, x, y).backward()
    return numbers(model)
