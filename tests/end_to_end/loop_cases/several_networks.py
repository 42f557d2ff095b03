"""Loops with several networks: adversarial ones, actors and critics, teachers and students, ensembles."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.end_to_end.loop_cases.environments import Environment
from tests.end_to_end.loop_cases.fragments import STEPS, adam, mse, net, numbers, samples, sgd, train
from tests.end_to_end.loop_cases.table import Expected, Numbers, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER


def real(logits: Tensor) -> Tensor:
    """The loss of calling samples real."""
    return F.softplus(-logits).mean()


def fake(logits: Tensor) -> Tensor:
    """The loss of calling samples fake."""
    return F.softplus(logits).mean()


def toggle(model: nn.Module, trains: bool) -> None:
    """Freeze or unfreeze `model`."""
    for parameter in model.parameters():
        parameter.requires_grad_(trains)


# ---- adversarial networks


@case()
def gan(env: Environment) -> Numbers:
    """The discriminator steps, then the generator, whose samples are detached for the discriminator."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        optimizer_d.zero_grad()
        for x, noise in batch:
            (real(d(x)) + fake(d(g(noise).detach()))).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        for _, noise in batch:
            real(d(g(noise))).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_of_two_backwards(env: Environment) -> Numbers:
    """The discriminator's losses on real and on fake samples have backward passes of their own."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        d.zero_grad()
        for x, noise in batch:
            real(d(x)).backward()
            fake(d(g(noise).detach())).backward()
        optimizer_d.step()
        g.zero_grad()
        for _, noise in batch:
            real(d(g(noise))).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_without_detach(env: Environment) -> Numbers:
    """The discriminator's backward pass reaches the generator too, whose gradients are discarded."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        optimizer_d.zero_grad()
        for x, noise in batch:
            (real(d(x)) + fake(d(g(noise)))).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        for _, noise in batch:
            real(d(g(noise))).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case(steps=ABSENT, why="one forward pass serves both steps, with micro-batches it does not")
def gan_of_one_forward_pass(env: Environment) -> Numbers:
    """The generator's samples are computed once, and serve both networks."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        for x, noise in batch:
            samples_of_g = g(noise)
            optimizer_d.zero_grad()
            (real(d(x)) + fake(d(samples_of_g.detach()))).backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            real(d(samples_of_g)).backward()
            optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_of_simultaneous_steps(env: Environment) -> Numbers:
    """Both networks have their gradients before either steps."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        optimizer_g.zero_grad()
        for _, noise in batch:
            real(d(g(noise))).backward()
        optimizer_d.zero_grad()
        for x, noise in batch:
            (real(d(x)) + fake(d(g(noise).detach()))).backward()
        optimizer_g.step()
        optimizer_d.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_with_frozen_discriminator(env: Environment) -> Numbers:
    """The discriminator is frozen while the generator trains."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        toggle(d, True)
        optimizer_d.zero_grad()
        for x, noise in batch:
            (real(d(x)) + fake(d(g(noise).detach()))).backward()
        optimizer_d.step()
        toggle(d, False)
        optimizer_g.zero_grad()
        for _, noise in batch:
            real(d(g(noise))).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_generator_every_second_step(env: Environment) -> Numbers:
    """WGAN: the critic's weights are clamped, and the generator steps at every second step."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    optimizer_g, optimizer_d = torch.optim.RMSprop(g.parameters(), 1e-2), torch.optim.RMSprop(d.parameters(), 1e-2)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, optimizer_g, optimizer_d)
    for step, batch in enumerate(env.batches(samples("x", "noise"), STEPS)):
        optimizer_d.zero_grad()
        for x, noise in batch:
            (d(g(noise).detach()).mean() - d(x).mean()).backward()
        optimizer_d.step()
        for parameter in d.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        if step % 2:
            optimizer_g.zero_grad()
            for _, noise in batch:
                (-d(g(noise)).mean()).backward()
            optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_with_several_critic_steps(env: Environment) -> Numbers:
    """The critic takes three steps with each batch."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))
    for batch in env.batches(samples("x", "noise"), STEPS):
        for _ in range(3):
            optimizer_d.zero_grad()
            for x, noise in batch:
                (d(g(noise).detach()).mean() - d(x).mean()).backward()
            optimizer_d.step()
        optimizer_g.zero_grad()
        for _, noise in batch:
            (-d(g(noise)).mean()).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def gan_with_gradient_penalty(env: Environment) -> Numbers:
    """WGAN-GP: the critic's slope between real and fake samples is to be 1 (double backward)."""
    g, d = net(4, 8, 5), net(5, 8, 1, seed=1)
    g, d, optimizer_g, optimizer_d = env.bind(g, d, adam(g), adam(d))

    def penalty(x: Tensor, made: Tensor, place: Tensor) -> Tensor:
        between = (place * x + (1 - place) * made).requires_grad_()
        (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    for batch in env.batches(samples("x", "noise", "uniform"), STEPS):
        optimizer_d.zero_grad()
        for x, noise, place in batch:
            made = g(noise).detach()
            (d(made).mean() - d(x).mean() + 10 * penalty(x, made, place)).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        for _, noise, _ in batch:
            (-d(g(noise)).mean()).backward()
        optimizer_g.step()
    return numbers(g, d, optimizer_g, optimizer_d)


@case()
def cycle_gan(env: Environment) -> Numbers:
    """Two generators with one optimizer, two discriminators with another."""
    into, back, one, two = net(5, 6, 5), net(5, 6, 5, seed=1), net(5, 6, 1, seed=2), net(5, 6, 1, seed=3)
    into, back, one, two, makers, judges = env.bind(into, back, one, two, adam(into, back), adam(one, two))
    for batch in env.batches(samples("x", "pair"), STEPS):
        makers.zero_grad()
        for x, other in batch:
            cycle = F.l1_loss(back(into(x)), x) + F.l1_loss(into(back(other)), other)
            (cycle + real(two(into(x))) + real(one(back(other)))).backward()
        makers.step()
        judges.zero_grad()
        for x, other in batch:
            of_one = real(one(x)) + fake(one(back(other).detach()))
            of_two = real(two(other)) + fake(two(into(x).detach()))
            of_one.backward()
            of_two.backward()
        judges.step()
    return numbers(into, back, one, two, makers, judges)


@case()
def conditional_gan_with_auxiliary_classifier(env: Environment) -> Numbers:
    """A third network classifies, and trains with both steps."""
    g, d, c = net(4, 8, 5), net(5, 8, 1, seed=1), net(5, 8, 3, seed=2)
    g, d, c, optimizer_g, optimizer_d, optimizer_c = env.bind(g, d, c, adam(g), adam(d), adam(c))
    for batch in env.batches(samples("x", "noise", "label"), STEPS):
        optimizer_d.zero_grad()
        optimizer_c.zero_grad()
        for x, noise, label in batch:
            (real(d(x)) + fake(d(g(noise).detach())) + F.cross_entropy(c(x), label)).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        for _, noise, label in batch:
            made = g(noise)
            (real(d(made)) + F.cross_entropy(c(made), label)).backward()
        optimizer_g.step()
        optimizer_c.step()
    return numbers(g, d, c, optimizer_g, optimizer_d, optimizer_c)


# ---- reinforcement learning


def action_of(logits: Tensor, uniform: Tensor) -> Tensor:
    """Actions drawn from a policy, by one uniform number for each sample."""
    return (logits.detach().softmax(1).cumsum(1) < uniform).sum(1).clamp(max=logits.shape[1] - 1)


@case()
def policy_gradient(env: Environment) -> Numbers:
    """REINFORCE: the loss follows from actions that the policy draws."""
    policy = net(5, 8, 3)
    policy, optimizer = env.bind(policy, adam(policy))

    def loss_of(policy: nn.Module, x: Tensor, uniform: Tensor) -> Tensor:
        logits = policy(x)
        action = action_of(logits, uniform)
        reward = x.gather(1, action[:, None]).squeeze(1)
        return -(torch.distributions.Categorical(logits=logits).log_prob(action) * reward).mean()

    return train(env, policy, optimizer, loss_of=loss_of, data=samples("x", "uniform"))


@case(steps=ABSENT, why="a mean over workers is not one over micro-batches")
def policy_gradient_with_baseline(env: Environment) -> Numbers:
    """The mean reward of all workers is subtracted."""
    policy = net(5, 8, 3)
    policy, optimizer = env.bind(policy, adam(policy))

    def loss_of(policy: nn.Module, x: Tensor, uniform: Tensor) -> Tensor:
        logits = policy(x)
        action = action_of(logits, uniform)
        reward = x.gather(1, action[:, None]).squeeze(1)
        advantage = reward - env.mean(float(reward.mean()))
        return -(torch.distributions.Categorical(logits=logits).log_prob(action) * advantage).mean()

    return train(env, policy, optimizer, loss_of=loss_of, data=samples("x", "uniform"))


@case()
def actor_critic_of_one_loss(env: Environment) -> Numbers:
    """Actor and critic have one backward pass, and an optimizer each."""
    actor, critic = net(5, 8, 3), net(5, 8, 1, seed=1)
    actor, critic, first, second = env.bind(actor, critic, adam(actor), adam(critic))
    for batch in env.batches(samples("x", "uniform", "y"), STEPS):
        first.zero_grad()
        second.zero_grad()
        for x, uniform, reward in batch:
            logits, value = actor(x), critic(x)
            policy = torch.distributions.Categorical(logits=logits)
            advantage = (reward - value.detach()).squeeze(1)
            chosen = policy.log_prob(action_of(logits, uniform))
            (F.mse_loss(value, reward) - (chosen * advantage).mean() - 0.01 * policy.entropy().mean()).backward()
        first.step()
        second.step()
    return numbers(actor, critic, first, second)


@case()
def actor_critic_of_two_losses(env: Environment) -> Numbers:
    """The critic steps first, and then the actor, through the critic (DDPG), with slowly following targets."""
    actor, critic = net(5, 8, 2), net(7, 8, 1, seed=1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor, critic, first, second = env.bind(actor, critic, adam(actor), adam(critic))
    for batch in env.batches(samples("x", "noise", "y", "pair"), STEPS):
        second.zero_grad()
        for x, noise, reward, after in batch:
            with torch.no_grad():
                target = reward + 0.9 * slow_critic(torch.cat([after, slow_actor(after)], 1))
            F.mse_loss(critic(torch.cat([x, noise[:, :2]], 1)), target).backward()
        second.step()
        first.zero_grad()
        for x, *_ in batch:
            (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
        first.step()
        with torch.no_grad():
            for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
                for mine, other in zip(slow.parameters(), fast.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
    return numbers(actor, critic, slow_actor, slow_critic, first, second)


@case()
def clipped_policy_epochs(env: Environment) -> Numbers:
    """PPO: with each batch the policy takes three steps, measured by its probabilities before the first."""
    policy = net(5, 8, 4)  # three actions and a value
    policy, optimizer = env.bind(policy, adam(policy))
    for batch in env.batches(samples("x", "uniform", "y"), STEPS):
        before = copy.deepcopy(policy).requires_grad_(False)
        for _ in range(3):
            optimizer.zero_grad()
            for x, uniform, reward in batch:
                old, new = before(x), policy(x)
                action = action_of(old[:, :3], uniform)[:, None]
                ratio = (new[:, :3].log_softmax(1) - old[:, :3].log_softmax(1)).gather(1, action).exp()
                advantage = reward - old[:, 3:]
                clipped = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
                (F.mse_loss(new[:, 3:], reward) - clipped.mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    return numbers(policy, optimizer)


@case()
def q_learning(env: Environment) -> Numbers:
    """DQN: a target network is a copy of the online one, renewed at every second step."""
    online = net(5, 8, 3)
    target = copy.deepcopy(online)
    online, optimizer = env.bind(online, adam(online))
    steps = iter(range(STEPS))

    def loss_of(online: nn.Module, x: Tensor, label: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            best = reward.squeeze(1) + 0.9 * target(after).amax(1)
        return F.smooth_l1_loss(online(x).gather(1, label[:, None]).squeeze(1), best)

    def renew() -> None:
        if next(steps) % 2:
            target.load_state_dict(online.state_dict())

    data = samples("x", "label", "y", "pair")
    found = train(env, online, optimizer, loss_of=loss_of, data=data, after_step=renew)
    return {**found, **numbers(target=torch.cat([p.flatten() for p in target.parameters()]))}


@case()
def double_q_learning(env: Environment) -> Numbers:
    """Twin critics with one optimizer; the smaller target counts."""
    one, two = net(5, 8, 3), net(5, 8, 3, seed=1)
    slow_one, slow_two = copy.deepcopy(one), copy.deepcopy(two)
    one, two, optimizer = env.bind(one, two, adam(one, two))
    for batch in env.batches(samples("x", "label", "y", "pair"), STEPS):
        optimizer.zero_grad()
        for x, label, reward, after in batch:
            with torch.no_grad():
                best = reward.squeeze(1) + 0.9 * torch.minimum(slow_one(after), slow_two(after)).amax(1)
            found = [critic(x).gather(1, label[:, None]).squeeze(1) for critic in (one, two)]
            sum(F.mse_loss(each, best) for each in found).backward()  # type: ignore[union-attr]
        optimizer.step()
    return numbers(one, two, optimizer)


# ---- teachers, students and representations


@case()
def distillation(env: Environment) -> Numbers:
    """A student learns from a frozen teacher that is not bound."""
    teacher, student = net(5, 16, 3, seed=1).eval().requires_grad_(False), net(5, 8, 3)
    student, optimizer = env.bind(student, adam(student))

    def loss_of(student: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        soft = F.kl_div(F.log_softmax(student(x) / 2, 1), F.softmax(teacher(x) / 2, 1), reduction="batchmean")
        return 4 * soft + F.cross_entropy(student(x), label)

    return train(env, student, optimizer, loss_of=loss_of, data=samples("x", "label"))


@case(own=EITHER, steps=EITHER, why="a model that has nothing to train may be refused")
def distillation_with_bound_teacher(env: Environment) -> Numbers:
    """The frozen teacher is bound too, and has other weights on each worker before."""
    teacher, student = net(5, 16, 3, seed=1 + env.rank).requires_grad_(False), net(5, 8, 3)
    student, teacher, optimizer = env.bind(student, teacher, adam(student))
    return train(env, student, optimizer, data=samples("x"), loss_of=lambda m, x: F.mse_loss(m(x), teacher(x)))


@case()
def mutual_learning(env: Environment) -> Numbers:
    """Two students learn from each other's detached outputs."""
    one, two = net(5, 8, 3), net(5, 6, 3, seed=1)
    one, two, first, second = env.bind(one, two, sgd(one), adam(two))
    for batch in env.batches(samples("x", "label"), STEPS):
        first.zero_grad()
        second.zero_grad()
        for x, label in batch:
            outputs = one(x), two(x)
            for mine, other in (outputs, outputs[::-1]):
                near = F.kl_div(mine.log_softmax(1), other.detach().softmax(1), reduction="batchmean")
                (F.cross_entropy(mine, label) + near).backward()
        first.step()
        second.step()
    return numbers(one, two, first, second)


@case()
def mean_teacher(env: Environment) -> Numbers:
    """The teacher is the student's moving average, and the student is to agree with it."""
    student = net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, optimizer = env.bind(student, sgd(student))

    def loss_of(student: nn.Module, x: Tensor, y: Tensor, other: Tensor) -> Tensor:
        return mse(student, x, y) + F.mse_loss(student(other), teacher(other))

    @torch.no_grad()
    def follow() -> None:
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    found = train(env, student, optimizer, loss_of=loss_of, data=samples("x", "y", "pair"), after_step=follow)
    return {**found, **numbers(teacher=torch.cat([p.flatten() for p in teacher.parameters()]))}


@case()
def bootstrapped_representations(env: Environment) -> Numbers:
    """BYOL: a predictor on top of the online network is to meet a slow target network."""
    online, predictor = net(5, 8, 4), net(4, 8, 4, seed=1)
    target = copy.deepcopy(online).requires_grad_(False)
    online, predictor, optimizer = env.bind(online, predictor, adam(online, predictor))
    for batch in env.batches(samples("x", "pair"), STEPS):
        optimizer.zero_grad()
        for one, two in batch:
            losses = [
                1 - F.cosine_similarity(predictor(online(a)), target(b)).mean() for a, b in ((one, two), (two, one))
            ]
            (losses[0] + losses[1]).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
    return numbers(online, predictor, target, optimizer)


@case()
def siamese(env: Environment) -> Numbers:
    """One encoder for anchor, positive and negative sample of a triplet loss."""
    encoder = net(5, 8, 4)
    encoder, optimizer = env.bind(encoder, adam(encoder))
    return train(
        env, encoder, optimizer, data=samples("x", "pair", "third"),
        loss_of=lambda m, a, b, c: F.triplet_margin_loss(m(a), m(b), m(c), margin=2.0),
    )  # fmt: skip


@case()
def contrastive_within_the_share(env: Environment) -> Numbers:
    """InfoNCE, whose negatives are the other samples of the share."""
    encoder = net(5, 8, 4)
    encoder, optimizer = env.bind(encoder, adam(encoder))

    def of_share(_: int, one: Tensor, two: Tensor) -> Tensor:
        first, second = F.normalize(encoder(one)), F.normalize(encoder(two))
        return F.cross_entropy(first @ second.t() / 0.5, torch.arange(len(one)))

    return train(
        env, encoder, optimizer, data=samples("x", "pair"), loss_of=lambda m, a, b: env.share_mean(of_share, a, b)
    )


@case()
def variational_autoencoder(env: Environment) -> Numbers:
    """Encoder and decoder with one optimizer; the noise belongs to the sample."""
    encoder, decoder = net(5, 8, 8), net(4, 8, 5, seed=1)
    encoder, decoder, optimizer = env.bind(encoder, decoder, adam(encoder, decoder))
    for batch in env.batches(samples("x", "noise"), STEPS):
        optimizer.zero_grad()
        for x, noise in batch:
            mean, log = encoder(x).chunk(2, 1)
            code = mean + (log / 2).exp() * noise
            divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
            (F.mse_loss(decoder(code), x) + 0.1 * divergence).backward()
        optimizer.step()
    return numbers(encoder, decoder, optimizer)


@case()
def alternating_blocks(env: Environment) -> Numbers:
    """Encoder and decoder have an optimizer each, and take turns."""
    encoder, decoder = net(5, 3), net(3, 5, seed=1)
    encoder, decoder, first, second = env.bind(encoder, decoder, sgd(encoder), sgd(decoder))
    for step, batch in enumerate(env.batches(samples("x"), STEPS)):
        first.zero_grad()
        second.zero_grad()
        for (x,) in batch:
            F.mse_loss(decoder(encoder(x)), x).backward()
        (second if step % 2 else first).step()
    return numbers(encoder, decoder, first, second)


@case()
def denoising_diffusion(env: Environment) -> Numbers:
    """A network predicts the noise of a sample at a given time."""
    model = net(6, 16, 4)
    model, optimizer = env.bind(model, adam(model))

    def loss_of(model: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        noisy = (1 - time).sqrt() * x[:, :4] + time.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time, time.square()], 1)), noise)

    return train(env, model, optimizer, loss_of=loss_of, data=samples("x", "noise", "uniform"))


# ---- ensembles, and networks that make others


@case()
def ensemble(env: Environment) -> Numbers:
    """Three models with three optimizers in one loop."""
    models = [net(seed=seed) for seed in range(3)]
    *everything, last = env.bind(*models, *(sgd(m) for m in models))
    models, optimizers = everything[:3], [*everything[3:], last]
    for batch in env.batches(samples("x", "y"), STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in batch:
            for model in models:
                mse(model, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return numbers(*models, *optimizers)


@case()
def bound_one_after_the_other(env: Environment) -> Numbers:
    """Two models, each bound with its optimizer by a call of its own."""
    one, first = env.bind(model := net(), sgd(model))
    two, second = env.bind(model := net(seed=1), adam(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        first.zero_grad()
        second.zero_grad()
        for x, y in batch:
            (mse(one, x, y) + F.mse_loss(two(x), one(x))).backward()
        first.step()
        second.step()
    return numbers(one, two, first, second)


@case(steps=EITHER, why="one call of world.steps gives all data")
def folds(env: Environment) -> Numbers:
    """k-fold: a new model and a new optimizer for each fold."""
    found: dict[str, Tensor] = {}
    for fold in range(3):
        model = net(seed=fold)
        model, optimizer = env.bind(model, sgd(model))
        found |= {f"fold {fold}: {name}": value for name, value in train(env, model, optimizer).items()}
    return found


@case(steps=EITHER, why="one call of world.steps gives all data")
def one_model_after_the_other(env: Environment) -> Numbers:
    """An autoencoder trains first; then a classifier on its frozen encoder."""
    encoder, decoder, classifier = net(5, 8), net(8, 5, seed=1), net(8, 3, seed=2)
    encoder, decoder, optimizer = env.bind(encoder, decoder, adam(encoder, decoder))
    first = train(env, encoder, optimizer, data=samples("x"), loss_of=lambda m, x: F.mse_loss(decoder(m(x).tanh()), x))
    encoder.requires_grad_(False)
    classifier, optimizer = env.bind(classifier, adam(classifier))
    second = train(
        env, classifier, optimizer, data=samples("x", "label"),
        loss_of=lambda m, x, label: F.cross_entropy(m(encoder(x).tanh()), label),
    )  # fmt: skip
    return {**{f"first {n}": v for n, v in first.items()}, **second}


@case()
def hypernetwork(env: Environment) -> Numbers:
    """A network makes the weights of another one that has none of its own."""
    maker = net(4, 8, 6)
    maker, optimizer = env.bind(maker, adam(maker))

    def loss_of(maker: nn.Module, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        made = maker(noise)
        return F.mse_loss((x * made[:, :5]).sum(1, keepdim=True) + made[:, 5:], y)

    return train(env, maker, optimizer, loss_of=loss_of, data=samples("x", "y", "noise"))
