"""Rules of `diagnosis` about the update and the reward: what makes training stand still, break, or go astray."""

from __future__ import annotations

from typing import Any

import numpy as np

from ajet.observe.run_evidence import (
    LONGEST_WINDOW,
    Level,
    RunEvidence,
    RunFinding,
    as_number,
    as_percent,
    changed,
)

_MOST = 0.5
_ALIKE = 0.8
"""Share of groups without variance from which next to nothing is taught."""
_SOLVED, _UNSOLVED, _NEARLY_ALL, _CHANCE = 0.9, 0.02, 0.95, 0.1
_GAP = 0.01
"""Difference of a log-probability in float32 that rounding can't explain (`ajet.backbone.failures.GapWatch`)."""
_GAP_ANY_FORMAT, _GAP_MEAN = 1.0, 0.02
_STALE = 2.0
_KL_OF_A_FALL, _KL, _KL_LARGE = 0.1, 0.3, 1.0
_COLLAPSED, _COLLAPSED_IN_A_FALL = 0.25, 0.5
_LONGER = 1.5
_GAP_OF_VALIDATION = 0.3
_SWAMPED = 20.0
_FEWEST = 8
"""Episodes, calls or attempts that say something."""

# ---------------------------------------------------------------- the update


def sampler_gap(run: RunEvidence) -> list[RunFinding]:
    """Trainer and engine compute different probabilities of the same tokens."""
    gap, stale = run.figures.of("loss/sampler_gap_max", "train/sampler_gap"), run.figures.of("train/staleness/max")
    old = dict(zip(stale.steps, stale.values, strict=True))
    fresh = {step: value for step, value in zip(gap.steps, gap.values, strict=True) if not old.get(step)}
    if not fresh:
        return []
    step = max(fresh, key=lambda one: fresh[one])
    mean = run.figures.of("loss/sampler_kl")
    largest_mean = max(
        (abs(value) for at, value in zip(mean.steps, mean.values, strict=True) if at in fresh), default=0
    )
    dtype = run.key("model.dtype")
    bound = _GAP if dtype == "float32" else _GAP_ANY_FORMAT
    if fresh[step] <= bound and largest_mean <= _GAP_MEAN:
        return []
    other = "" if dtype == "float32" else "; model.dtype: float32 tells whether it is rounding"
    return [
        RunFinding(
            "bad", "sampler_gap",
            f"The trainer's log-probability of some token differs from the engine's by {as_number(fresh[step])} (step "
            f"{step}). Each update is off by as much.",
            {"loss/sampler_gap_max": fresh[step], "loss/sampler_kl": largest_mean, "step": step},
            change=f"the engine has other weights, another number format or temperature than the trainer{other}",
            link="charts?find=sampler",
        )
    ]  # fmt: skip


def nothing_trained(run: RunEvidence) -> list[RunFinding]:
    """Groups differ, and yet no weight moves."""
    groups, alike = run.figures.total("credit/groups"), run.figures.total("credit/zero_variance_groups") or 0.0
    if not groups or alike > _ALIKE * groups:
        return []
    for name, cause, change in (
        (
            "train/lr",
            "the learning rate was 0 in every step",
            "trainer_common.optim.lr: 1e-6, or more for a small model",
        ),
        ("tokens/trained", "no token was trained", "look at masked/… and dropped/…, which name the reasons"),
        ("train/grad_norm", "the gradient was 0", "look at masked/… and credit/…: something leaves the tokens out"),
    ):
        series = run.figures.of(name)
        if series.steps and not series.values.any():
            text = f"Nothing is learned: {cause}, although rewards differ within groups."
            return [RunFinding("bad", "nothing_trained", text, {name: 0.0, "steps": len(series.steps)}, change=change)]
    return []


def staleness(run: RunEvidence) -> list[RunFinding]:
    """Tokens that much older weights sampled."""
    lately = run.figures.lately("train/staleness")
    if not lately.steps or lately.mean <= _STALE:
        return []
    most = run.figures.lately("train/staleness/max")
    evidence = {"train/staleness": lately.mean, **({"train/staleness/max": most.values.max()} if most.steps else {})}
    if run.key("trainer_common.algorithm.replay.groups"):
        change = f"trainer_common.algorithm.replay.max_age: {run.key('trainer_common.algorithm.replay.max_age')} → 1"
    else:
        change = f"rollout.max_staleness: {run.key('rollout.max_staleness')} → 1"
    text = (
        f"What is trained in {lately.where} was sampled {as_number(lately.mean)} updates earlier on average: "
        "its advantages belong to another policy."
    )
    earned = run.figures.change("return/mean")
    level: Level = "warn" if earned is None or earned.risen else "bad"
    return [RunFinding(level, "staleness", text, evidence, change=change, link="charts?find=staleness")]


def kl_growth(run: RunEvidence) -> list[RunFinding]:
    """The model leaves the one that it started from, and earns no more for it."""
    series = run.figures.of("train/kl")
    earned = run.figures.change("return/mean")
    if len(series.steps) < 2 or (earned is not None and earned.risen):
        return []
    first, at = float(series.values[0]), int(series.values.argmax())
    peak, fell = float(series.values[at]), earned is not None and earned.fallen
    if peak < (_KL_OF_A_FALL if fell else _KL) or peak < 3 * first:
        return []
    if not fell and run.figures.lately("train/kl").mean < _KL:
        return []  # it came back: the KL term holds it, perhaps too tightly
    if _asks_for_less_entropy(run) and entropy_collapse(run):
        return []  # which says why
    return [
        RunFinding(
            "bad" if fell or peak >= _KL_LARGE else "warn", "kl_growth",
            f"The divergence from the starting model grew from {as_number(first)} to {as_number(peak)} per token in "
            f"step {series.steps[at]}, and the reward {'fell' if fell else 'did not rise'}: the steps are too large.",
            {"train/kl": [first, peak], "steps": [series.steps[0], series.steps[at]]},
            change=f"{changed(run, 'trainer_common.optim.lr', 1 / 3)}, or a larger trainer_common.kl_loss_coef; go on "
            "from the best checkpoint",
            link="charts?find=kl",
        )
    ]  # fmt: skip


def entropy_collapse(run: RunEvidence) -> list[RunFinding]:
    """The model no longer explores, and earns no more for it; or the loss asks for that."""
    series = run.figures.of("train/entropy")
    count = len(series.steps)
    if count < 2:
        return []
    first, last = float(series.values[: (count + 1) // 2].max()), series.part(-max(1, count // 4)).mean
    earned, success = run.figures.change("return/mean"), run.figures.lately("success/rate")
    better = (success.steps and success.mean >= _SOLVED) or (earned is not None and earned.risen)
    fell, asked = earned is not None and earned.fallen, _asks_for_less_entropy(run)
    if (better and not asked) or last >= (_COLLAPSED_IN_A_FALL if fell or asked else _COLLAPSED) * first:
        return []
    coefficient = "trainer_common.algorithm.entropy_coef"
    why = (
        f"{coefficient} is negative, so the loss asks for it"
        if asked
        else f"the reward {'fell' if fell else 'did not rise'}: the model says the same each time, and finds nothing "
        "better"
    )
    change = f"{coefficient}: {as_number(run.key(coefficient))} → 0" if asked else _explore(run)
    text = f"The entropy fell from {as_number(first)} to {as_number(last)}, and {why}."
    evidence = {"train/entropy": [first, last], "steps": [series.steps[0], series.steps[-1]]}
    level: Level = "bad" if not better or last < _COLLAPSED * first else "warn"
    return [
        RunFinding(level, "entropy_collapse", text, evidence, _newest(run), change=change, link="charts?find=entropy")
    ]


def _explore(run: RunEvidence) -> str:
    """What to change so that replies differ again."""
    lower = changed(run, "trainer_common.optim.lr", 1 / 3)
    hotter = "rollout.temperature: 1.0, " if (run.key("rollout.temperature") or 1.0) < 1.0 else ""
    return f"{lower}, {hotter}or a larger trainer_common.kl_loss_coef; start again from an earlier checkpoint"


def _asks_for_less_entropy(run: RunEvidence) -> bool:
    """Whether the loss itself does."""
    return (run.key("trainer_common.algorithm.entropy_coef") or 0.0) < 0


# ---------------------------------------------------------------- the reward


def gaming(run: RunEvidence) -> list[RunFinding]:
    """Episodes that are paid as if they had succeeded, and haven't. Only where success is stated."""
    late = [row for row in run.late if row["success"] is not None and row["reward"] is not None]
    if len(late) < _FEWEST:
        return []
    missed = [row for row in late if not row["success"]]
    rewarded = [row for row in (*run.early, *run.late) if row["success"] is not None and row["reward"] is not None]
    won = [row["reward"] for row in rewarded if row["success"]]
    lost = [row["reward"] for row in rewarded if not row["success"]]
    earned, success = run.figures.change("return/mean"), run.figures.change("success/rate")
    as_won = [row for row in late if len(won) >= 3 and row["reward"] > 0 and row["reward"] >= 0.9 * np.mean(won)]
    paid = [row for row in as_won if not row["success"]]
    level: Level
    if len(won) >= 3 and len(lost) >= _FEWEST and np.mean(won) < np.mean(lost):
        level, paid = "bad", missed
        text = f"Successes earn {as_number(float(np.mean(won)))} on average, failures {as_number(float(np.mean(lost)))}"
    elif len(paid) >= max(_FEWEST, _MOST * len(as_won)):
        text = (
            f"Of the last {len(late)} episodes, {len(as_won)} were paid like a success, and {len(paid)} of these failed"
        )
        level = "bad"
    elif earned and earned.risen and success and success.fallen:
        level, text, paid = "bad", "The reward rises while successes become fewer", missed
    elif earned and earned.risen and success and not won and earned.last - earned.first > _spread(late):
        level, text, paid = "warn", "The reward rises, and no episode has succeeded yet", missed
    elif _best_paid(late, rewarded) and not won:
        level, paid = "bad", missed
        text = f"Nearly each of the last {len(late)} episodes earned as much as the best, and none has succeeded"
    else:
        return []
    rise = f" (reward {as_number(earned.first)} to {as_number(earned.last)})" if earned else ""
    best = sorted(paid, key=lambda row: row["reward"], reverse=True)
    paid_for = "is paid for something else" if level == "bad" else "is on its way, or paid for something else"
    return [
        RunFinding(
            level, "gaming", f"{text}: the model {paid_for}{rise}.",
            {"paid_without_success": len(paid), "episodes": len(late)},
            tuple(row["episode_id"] for row in best[:3]),
            "read the best-paid failures, then make the reward check the result instead of its form",
            "episodes?success=no&sort=reward&order=desc",
        )
    ]  # fmt: skip


def _best_paid(late: list[dict[str, Any]], rewarded: list[dict[str, Any]]) -> bool:
    """Whether next to all late episodes earn what the best do, of a reward that can tell episodes apart."""
    bar = 0.9 * max(row["reward"] for row in rewarded)
    best = sum(row["reward"] >= bar for row in late)
    return bar > 0 and best >= _NEARLY_ALL * len(late) and any(row["reward"] < bar for row in rewarded)


def length_drift(run: RunEvidence) -> list[RunFinding]:
    """Replies grow longer and longer."""
    change = run.figures.change("episode/reply_length")
    if change is None or not change.risen or change.last < _LONGER * change.first:
        return []
    pays = _pay_of_length(run)
    earned = run.figures.change("return/mean")
    if earned and earned.risen and pays < _MOST:
        return []  # longer, better, and not paid by the token
    why = "longer replies of a group earn more" if pays >= _MOST else "the reward doesn't rise with it"
    longest = sorted(run.late, key=lambda row: row["sampled"], reverse=True)
    return [
        RunFinding(
            "warn", "length_drift",
            f"A reply had {change.first:.0f} tokens, and has {change.last:.0f} now ({change.where}): {why}.",
            {"episode/reply_length": [change.first, change.last], "correlation_with_reward": pays},
            tuple(row["episode_id"] for row in longest[:3]),
            "take the length out of the reward, or charge for the last stretch: "
            "trainer_common.algorithm.overlong.buffer",
            "charts?find=reply_length",
        )
    ]  # fmt: skip


def _pay_of_length(run: RunEvidence) -> float:
    """The correlation of length and reward within groups: of the first or the last steps, as once all replies are long,
    none differs."""
    return max(_correlation(run.groups_of(run.early)), _correlation(run.groups_of(run.late)))


def _correlation(groups: list[list[dict[str, Any]]]) -> float:
    lengths: list[float] = []
    rewards: list[float] = []
    for group in groups:
        of_group = np.array([[row["sampled"], row["reward"]] for row in group], np.float64)
        lengths.extend(of_group[:, 0] - of_group[:, 0].mean())
        rewards.extend(of_group[:, 1] - of_group[:, 1].mean())
    if not lengths or not np.std(lengths) or not np.std(rewards):
        return 0.0
    return float(np.corrcoef(lengths, rewards)[0, 1])


def part_dominates(run: RunEvidence) -> list[RunFinding]:
    """One part of a composite reward decides alone, and another that differs as well counts for nothing."""
    judged = [one.episode for one in run.read if one.episode.reward_parts]
    if len(judged) < _FEWEST:
        return []
    spread = {}
    for name in judged[0].reward_parts:
        values = [
            one.reward_parts[name] * one.reward_weights.get(name, 1.0) for one in judged if name in one.reward_parts
        ]
        spread[name] = float(np.std(values))
    name = max(spread, key=lambda one: spread[one])
    swamped = {other: value for other, value in spread.items() if 0 < value * _SWAMPED <= spread[name]}
    if not swamped:
        return []
    weights = ", ".join(f"{one} {as_number(judged[0].reward_weights.get(one, 1.0))}" for one in spread)
    return [
        RunFinding(
            "warn", "part_dominates",
            f"The part {name} decides the reward alone: it varies by {as_number(spread[name])}, "
            + " and ".join(f"{other} by {as_number(value)}" for other, value in swamped.items()) + ", all weighted.",
            spread, tuple(one.episode_id for one in judged[:3]),
            f"bring the weights into balance (now {weights}), or scale the parts to one range",
            "charts?find=reward",
        )
    ]  # fmt: skip


# ---------------------------------------------------------------- groups and tasks


def no_variance(run: RunEvidence) -> list[RunFinding]:
    """Groups whose episodes earn the same, so that none is better than another; and why that is."""
    groups, alike = run.figures.lately("credit/groups"), run.figures.lately("credit/zero_variance_groups")
    if not groups.steps or not alike.steps or not groups.values.sum():
        return []
    share = float(alike.values.sum() / groups.values.sum())
    if share < _ALIKE:
        return []
    evidence = {"credit/zero_variance_groups": alike.values.sum(), "credit/groups": groups.values.sum()}
    success = run.figures.of("success/rate")
    first, last = (success.values[0], run.figures.lately("success/rate").mean) if success.steps else (0.0, 0.0)
    said = f"{as_percent(share)} of the groups in {groups.where} have equal rewards"
    ids, link = _newest(run), "episodes?groups=equal"
    if last >= _SOLVED:
        if first < _SOLVED:
            text = f"{said}: the tasks are solved ({as_percent(last)}). Little is left to learn from them."
            return [RunFinding("good", "solved", text, evidence, change="harder tasks, or stop here", link=link)]
        text = f"{said}: {as_percent(last)} of the episodes succeed, and did so from the first step."
        return [
            RunFinding(
                "bad", "always_solved", text, evidence, ids, "harder tasks, if the judge is right to pay all", link
            )
        ]
    if last <= _UNSOLVED < first - _CHANCE:
        return []  # it could, and has lost it: `reward_fell`
    earned = [row["reward"] for row in run.late if row["reward"] is not None]
    rewards = set(earned)
    if last <= _UNSOLVED and earned and min(earned) <= 0.0 and earned.count(min(earned)) >= _NEARLY_ALL * len(earned):
        text = f"{said}: next to no episode earns anything."
        change = "easier tasks, a finer reward or imitation first: `ajet audit` tells which. Or the judge is at fault"
        return [RunFinding("bad", "never_solved", text, evidence, ids, change, link)]
    entropy = run.figures.change("train/entropy")
    if entropy and entropy.last < _COLLAPSED * entropy.first:
        text = f"{said}: the model says the same each time (entropy {as_number(entropy.first)}, now "
        text += f"{as_number(entropy.last)}). If it could say something better, it no longer finds it."
        return [RunFinding("bad", "no_variance", text, evidence, ids, _explore(run), link)]
    each = f": each earns {as_number(rewards.pop())}, whatever it did" if len(rewards) == 1 else ""
    change = (
        "a judge that tells good from bad"
        if each
        else f"a finer reward{_curriculum(run)}, or {changed(run, 'rollout.num_repeat', 2)}"
    )
    return [
        RunFinding("bad", "no_variance", f"{said}{each}. None is better than another.", evidence, ids, change, link)
    ]


def _curriculum(run: RunEvidence) -> str:
    """Advice to prefer tasks in between, for a run that doesn't."""
    key = "task_reader.curriculum.enabled"
    return "" if run.key(key) else f", or {key}: true, which prefers tasks in between"


def validation_gap(run: RunEvidence) -> list[RunFinding]:
    """What is learned in training isn't there in validation."""
    validation, training = run.figures.of("val/return/mean"), run.figures.of("return/mean")
    if not validation.steps or not training.steps or validation.steps[-1] == 0:
        return []
    half = -max(1, min(LONGEST_WINDOW, len(training.steps) // 2))  # of few steps, the last alone says little
    at_end = training.part(half)
    gap = at_end.mean - float(validation.values[-1])
    spread, count = run.figures.of("val/return/std"), run.figures.of("val/episode/usable")
    chance = spread.values[-1] ** 2 / count.values[-1] if spread.steps and count.steps else 0.0
    drawn, groups = run.figures.of("return/std").part(half), run.figures.of("credit/groups").part(half)
    if drawn.steps and groups.steps:  # episodes of one group are alike: each group counts once
        chance += float((drawn.values**2).mean() / max(1.0, groups.values.sum()))
    scale = max(abs(at_end.mean), float(run.figures.of("return/std").values.max(initial=0.0)))
    if gap <= 3 * chance**0.5 or gap <= _GAP_OF_VALIDATION * scale:
        return []
    earned = run.figures.change("return/mean")
    rises = (
        ", and only training has risen"
        if earned and earned.risen and validation.values[-1] <= validation.values[0]
        else ""
    )
    return [
        RunFinding(
            "warn", "validation_gap",
            f"Training earns {as_number(at_end.mean)} in {at_end.where}, validation {as_number(validation.values[-1])} "
            f"at step {validation.steps[-1]}{rises}.",
            {"return/mean": at_end.mean, "val/return/mean": float(validation.values[-1])},
            run.episodes("reward IS NOT NULL AND validation = 1"),
            "more training tasks and fewer epochs; check that both files ask for the same skill, and "
            "rollout.val_kwargs.temperature",
            "tasks",
        )
    ]  # fmt: skip


def reward_fell(run: RunEvidence) -> list[RunFinding]:
    """What was earned in the beginning is lost."""
    change = run.figures.change("return/mean")
    if change is None or not change.fallen or change.first - change.last < _MOST * abs(change.first):
        return []
    text = f"The training reward fell from {as_number(change.first)} to {as_number(change.last)} ({change.where})."
    lower = f"{changed(run, 'trainer_common.optim.lr', 1 / 3)}; go on from the best checkpoint"
    return [RunFinding("bad", "reward_fell", text, {"return/mean": [change.first, change.last]}, _newest(run), lower)]


def _newest(run: RunEvidence) -> tuple[str, ...]:
    return tuple(row["episode_id"] for row in run.late[:3])


def _spread(rows: list[dict[str, Any]]) -> float:
    return float(np.std([row["reward"] for row in rows]))
