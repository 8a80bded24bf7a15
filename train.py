"""Train a chat model with verifiable emotion rewards: the loop that glues simulator, rollout and PPO or GRPO together.

Source: RLVER (arXiv 2507.03112) sec. 2-3, app. B.3. One step:
    1. who talks today   2. talk; the user feels   3. flatten   4. learn: ppo.py or grpo.py   5. numbers, dialogues   6. save
A run is a folder runs/NAME: config.json, metrics.jsonl, transcripts/, checkpoints/step-000010/ (Hugging Face format).
Run: python train.py --algo ppo --think          # no GPU, no key, no download: the embedded world, minutes on a laptop
     python train.py --resume runs/NAME          # goes on as if it had never stopped; Ctrl-C finishes the step and saves
"""
import argparse
import copy
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from tqdm import tqdm

import grpo
import ppo
import sft
from rollout import (
    ChatTokens,
    Dialogue,
    VLLMEngine,
    best_device,
    load_policy,
    make_engine,
    rollout,
    save_policy,
    seed_of,
    show_tokens,
    system_prompt,
    uses_vllm,
)
from simulator import PROMPTS, ScriptedSimulator, add_simulator_flags, language_of_all, load_scenarios, users_of, write_whole

# The embedded preset: what differs from the paper, and only that. A model of 0.6M parameters learns at another scale.
TINY = dict(steps=36, dialogues_per_step=64, start_emotion=40, max_turns=6, temperature=0.7, max_new_tokens=64, lr=6e-4,
            critic_lr=1e-3, warmup_steps=4, lr_end=0.3, adam_beta2=0.95, weight_decay=0.0, minibatches=4, ent_coef=0.0, kl_coef=0.15,
            critic_values="turn", critic_warmup=1, critic_lr_warmup=0, tokens_per_batch=8192, save_every=12)
TINY_PLAIN = dict(steps=60)             # without thoughts a step costs half and teaches less


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"train.py: error: {message} (--help lists the flags)\n")

    def add(group, flag, default, text, **kw):
        """One flag, one line; its help ends with the default, and with the embedded preset's where that differs."""
        name = flag[2:].replace("-", "_")
        if not isinstance(default, bool):
            kw.setdefault("type", type(default))
        shown = "empty" if default == "" else Path(default).relative_to(PROMPTS.parent) if name == "scenarios" else default
        group.add_argument(flag, default=default, help=f"{text} (default: {shown}" + (f"; tiny: {TINY[name]})" if name in TINY else ")"), **kw)

    run = parser.add_argument_group("run")
    add(run, "--algo", "ppo", "ppo or grpo", choices=("ppo", "grpo"))
    add(run, "--think", False, "think inside <think></think> before speaking, paper 2.3", action=argparse.BooleanOptionalAction)
    add(run, "--name", "", "folder under runs/ for this run, empty = ALGO-MODE-SEED")
    add(run, "--resume", "", "go on with this run folder; its own flags are used, other values are refused")
    add(run, "--override", "", "with --resume: flags that may change, as in --override steps,lr")
    add(run, "--steps", 1000, f"rollout + update steps, released script; tiny without --think: {TINY_PLAIN['steps']}")
    add(run, "--seed", 0, "seed of scenario order, users, sampling and initialisation")
    add(run, "--save-every", 5, "steps between checkpoints, released script; the last step is always saved")
    add(run, "--keep", 2, "newest checkpoints that are kept, beside the best by --eval-scenarios")
    add(run, "--eval-scenarios", "", "JSONL file played at every checkpoint (start 40, 9 turns, SAGE); the best checkpoint is kept; empty = none")
    add(run, "--tracker", "none", "also send the numbers to tensorboard or wandb", choices=("none", "tensorboard", "wandb"))
    add(run, "--threads", 0, "CPU threads for torch, 0 = torch's own choice")
    add(run, "--show-tokens", False, "print one dialogue of the first step token by token (role, trained, log-prob, value, advantage), then go on",
        action="store_true")
    world = parser.add_argument_group("the user")
    add(world, "--scenarios", str(PROMPTS / "en" / "train.jsonl"), "JSONL file of scenarios")
    add(world, "--start-emotion", 30, "points 0-100 at the start of a training dialogue, released code")
    add(world, "--max-turns", 8, "agent replies that are scored, paper B.3")
    add_simulator_flags(world)
    policy = parser.add_argument_group("policy and sampling")
    add(policy, "--model", "", "Hugging Face folder or name, empty = the embedded policy (sft.py builds it in about two minutes)")
    add(policy, "--engine", "auto", "vllm, or hf (plain transformers); auto = vllm where there is a GPU and vllm is installed",
        choices=("auto", "hf", "vllm"))
    add(policy, "--engine-memory", 0.5, "vllm: share of the GPU's memory for its weights and cache")
    add(policy, "--engine-sleep", False, "vllm on a GPU: free that memory during the update", action="store_true")
    add(policy, "--tensor-parallel", 1, "vllm under torchrun: ranks that hold one engine together, for a model larger than a GPU")
    add(policy, "--max-context", 0, "tokens of the longest dialogue, 0 = all that the model can")
    add(policy, "--lora-rank", 0, "train LoRA adapters of this rank on every linear layer instead of all weights (pip install peft); 0 = all weights")
    add(policy, "--dialogues-per-step", 32, "dialogues of one step over all groups, paper B.3 (GRPO there: 32 groups)")
    add(policy, "--group-size", 4, "GRPO: dialogues of one scenario and opening, paper B.3")
    add(policy, "--temperature", 1.0, "sampling temperature, released code; the learner scores at the same one")
    add(policy, "--max-new-tokens", 1024, "tokens of one reply, thought included (released code: 5000)")
    learn = parser.add_argument_group("learning")
    add(learn, "--lr", 1e-6, "policy learning rate, paper B.3")
    add(learn, "--critic-lr", 5e-6, "critic learning rate, released code")
    add(learn, "--warmup-steps", 20, "steps of linear warm-up of the policy's learning rate, released code; the first step already learns")
    add(learn, "--lr-end", 1.0, "share of the policy's learning rate left at the last step, linear in between; the paper's is constant")
    add(learn, "--adam-beta2", 0.999, "AdamW's second beta, released code")
    add(learn, "--weight-decay", 0.01, "AdamW weight decay, released code")
    add(learn, "--max-grad-norm", 1.0, "gradient clip of policy and critic, released code")
    add(learn, "--epochs", 1, "passes over a step's dialogues, released code")
    add(learn, "--minibatches", 1, "optimizer steps an epoch, dialogues split evenly; released code: 1, with --think about 8")
    add(learn, "--clip-eps", 0.2, "clip of the ratio, PPO Eq. 7, released code")
    add(learn, "--clip-high", 0.0, "how far the ratio may rise, 0 = --clip-eps; DAPO, arXiv 2503.14476")
    add(learn, "--reward", "final", "final: every turn earns the final emotion, released code; delta: what it changed, credited to it and the "
        "turns before it (paper 2.1's e_t)", choices=("final", "delta"))
    add(learn, "--loss-norm", "token", "policy loss averaged over agent tokens, released code, or dialogue by dialogue",
        choices=("token", "dialogue"))
    add(learn, "--imitation-coef", 0.0, "weight of the reward-weighted imitation loss -R log pi, paper 2.2 (in no released code)")
    add(learn, "--tis-cap", 2.0, "vllm: largest weight that corrects a token for engine and learner differing, 0 = none; "
        "https://fengyao.notion.site/off-policy-rl")
    add(learn, "--max-mismatch", 0.1, "stop when engine and learner differ by more (mean nats a token, before the first update of a step)")
    add(learn, "--ent-coef", 0.001, "entropy bonus, released code")
    add(learn, "--kl-coef", 0.0, "KL to the first policy, added to the loss; 0 builds no reference model, as in the paper")
    add(learn, "--format-reward", True, "a malformed turn earns 0, paper 2.3", action=argparse.BooleanOptionalAction)
    add(learn, "--gradient-checkpointing", False, "compute each layer again in the backward pass: less memory, a third more time",
        action="store_true")
    add(learn, "--dtype", "auto", "of matrix products; weights and Adam stay in float32; auto = bfloat16 on a GPU, else float32",
        choices=("auto", "float32", "bfloat16"))
    add(learn, "--tokens-per-batch", 16384, "tokens of one micro-batch, padding included; changes memory, not results")
    critic = parser.add_argument_group("PPO")
    add(critic, "--gamma", 1.0, "discount, released code")
    add(critic, "--gae-lambda", 1.0, "GAE lambda, released code")
    add(critic, "--gae", "", "turn: every turn is a segment that earns the final reward (paper); dialogue: one stream that earns it once, at the "
        "last turn, so the format of that turn alone counts; empty = turn, or dialogue with --reward delta", choices=("turn", "dialogue"))
    add(critic, "--value-clip", 0.5, "clip of the value's change, released code")
    add(critic, "--critic-values", "token", "token: a value before each agent token; turn: one a turn, read on the trunk alone",
        choices=("token", "turn"))
    add(critic, "--critic-warmup", 0, "first steps that train the critic only, released code")
    add(critic, "--critic-lr-warmup", 50, "steps of linear warm-up of the critic's learning rate, released script")
    group = parser.add_argument_group("GRPO")
    add(group, "--std", True, "divide by the group's standard deviation; off = Dr. GRPO", action=argparse.BooleanOptionalAction)
    parser.add_argument("--preset", choices=("auto", "paper", "tiny"), default="auto",
                        help="paper: the first default of each flag, needs --model; tiny: the embedded world on a CPU; auto: tiny without --model")
    first, _ = parser.parse_known_args(argv)
    tiny = first.preset == "tiny" or first.preset == "auto" and not first.model
    parser.set_defaults(**(TINY | ({} if first.think else TINY_PLAIN)) if tiny else {})
    args = parser.parse_args(argv)
    args.preset = "tiny" if tiny else "paper"
    if args.resume:                              # a namespace that has every name already takes only what was given
        given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args)))))
        args = args_of_run(args, {name: value for name, value in given.items() if value is not None})
    return check_args(args)


# what a flag may be, both ends included; RL needs sampled replies, so no temperature of 0
RANGES = {(1, math.inf): "steps save_every keep dialogues_per_step max_turns max_new_tokens epochs minibatches tokens_per_batch",
          (0, math.inf): "threads max_context lora_rank warmup_steps critic_warmup critic_lr_warmup clip_high value_clip kl_coef ent_coef "
                         "imitation_coef tis_cap max_mismatch",
          (0, 1): "gamma gae_lambda lr_end weight_decay", (0, 0.999999): "adam_beta2", (1e-12, 1): "lr critic_lr",
          (1e-9, math.inf): "clip_eps max_grad_norm", (0.01, 1): "engine_memory", (0.01, 100): "temperature"}


def check_args(args):
    """Raise ValueError for what cannot work, before anything is loaded."""
    if args.preset == "paper" and not args.model and not args.resume:
        raise ValueError("--preset paper needs --model (a Hugging Face folder or name); --preset tiny needs nothing")
    for (low, high), names in RANGES.items():
        for name in names.split():
            if not low <= getattr(args, name) <= high:             # NaN is refused too
                raise ValueError(f"--{name.replace('_', '-')} must be {f'from {low:g} to {high:g}' if high < math.inf else f'at least {low:g}'}, "
                                 f"not {getattr(args, name)}")
    if not 10 <= args.start_emotion < 100:
        raise ValueError(f"--start-emotion must be from 10 to 99, not {args.start_emotion}: dialogues end below 10 and at 100")
    uses_vllm(args.engine)                                         # not installed: say so now
    ranks, parallel = int(os.environ.get("WORLD_SIZE", 1)), args.tensor_parallel
    if parallel < 1 or ranks % parallel or parallel > 1 and args.engine != "vllm":
        raise ValueError(f"--tensor-parallel {parallel} needs --engine vllm and torchrun --nproc-per-node with a multiple of it, not {ranks}")
    if args.name in (".", "..") or "/" in args.name:
        raise ValueError(f"--name {args.name}: one folder name is needed, the run goes to runs/NAME")
    if args.tracker != "none":
        try:
            importlib.import_module("torch.utils.tensorboard" if args.tracker == "tensorboard" else "wandb")
        except ImportError:
            raise ValueError(f"--tracker {args.tracker} is not installed: pip install {args.tracker}") from None
    if args.reward == "delta" and args.algo == "ppo" and args.gae == "turn":
        raise ValueError("--reward delta needs --gae dialogue with PPO: within its own turn no token is credited with what follows")
    args.gae = args.gae or ("dialogue" if args.reward == "delta" else "turn")
    if args.algo == "grpo" and args.group_size < 2:
        raise ValueError("--group-size must be at least 2: GRPO compares the dialogues of a group")
    if args.algo == "grpo" and args.dialogues_per_step % args.group_size:
        raise ValueError(f"--dialogues-per-step {args.dialogues_per_step} is not a multiple of --group-size {args.group_size}")
    return args


# ---- the loop -----------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    scenarios = load_scenarios(args.scenarios)
    held_out = load_scenarios(args.eval_scenarios) if args.eval_scenarios else []
    system = system_prompt(args.think, language_of_all(scenarios + held_out))
    for scenario in scenarios + held_out if args.simulator == "scripted" else []:
        ScriptedSimulator(scenario)                                # a scenario without a script fails here, not later
    run = run_folder(args)
    make_user, client = users_of(args)
    pool = client and client.pool
    rank, world = start_ranks()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.preset == "tiny" and not args.model:
        args.model = first_rank_first(lambda: str(sft.cached_tiny(args.think)))
    torch.manual_seed(args.seed)
    newest = checkpoints(run)[-1:] if args.resume else []
    home = "cpu" if world > 1 else best_device()                     # where many ranks shard a model no GPU ever holds all of it
    policy, tokenizer = load_policy(args.model if args.lora_rank or not newest else newest[0], device=home)
    chat = ChatTokens(tokenizer)
    ref_policy = load_policy(args.model, device=home)[0].eval() if args.kl_coef else None
    for model in filter(None, (policy, ref_policy)):
        ppo.check_model(model, args.think)
    engine = make_engine(args.engine, newest[0] if newest else args.model,
                         copy.deepcopy(policy).to(best_device()) if world > 1 and not uses_vllm(args.engine) else policy, chat.end_ids,
                         args.max_new_tokens, args.temperature, max_context=args.max_context or None, memory=args.engine_memory,
                         sleep=args.engine_sleep, seed=args.seed, tensor_parallel=args.tensor_parallel)
    separate = world > 1 or isinstance(engine, VLLMEngine)           # the engine has weights of its own
    cfg = argparse.Namespace(**vars(args) | {"tis_cap": args.tis_cap * isinstance(engine, VLLMEngine)})
    if args.lora_rank:
        add_lora(policy, args.lora_rank)
    critic = ppo.Critic(policy, args.critic_values) if args.algo == "ppo" else None
    sampler = Sampler(scenarios, args.seed)
    rng = random.Random(args.seed)
    if rank == 0:
        lock = hold(run)                                             # noqa: F841  as long as this function runs
    saved = load_weights(run, policy, critic) if args.resume else None
    for model in filter(None, (policy, critic and critic.model, ref_policy)):
        model.in_bfloat16 = args.dtype == "bfloat16" or args.dtype == "auto" and best_device() == "cuda"
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
    for model in filter(None, (policy, critic, ref_policy)):
        shard(model)
    optimizers = make_optimizers(policy, critic, args)
    start, best, version = load_progress(run, saved, policy, critic, optimizers, sampler, rng) if saved else (0, None, 0)
    if separate:
        engine.sync(plain_weights(policy))
    engine.weight_version = version
    learner = ppo if args.algo == "ppo" else grpo
    if rank == 0:
        write_config(run, args)
        introduce(args, run, policy, engine, scenarios, world, start)
    track = tracker(args, run) if rank == 0 else None
    with catch_signals() as caught:
        bar = tqdm(range(start, args.steps), initial=start, total=args.steps, desc=f"{args.algo} {'think' if args.think else 'plain'}",
                   disable=None if rank == 0 else True)
        for step in bar:
            began = time.perf_counter()
            lr = set_learning_rates(optimizers, args, step)
            before = sampler.state()
            dialogues = sampler.next(args, step)                                                     # 1. who talks today
            user_of = lambda d: make_user(d.scenario, d.start_emotion, d.max_turns, seed_of("user", args.seed, step, d.group))
            seconds = play(engine, chat, dialogues, user_of, system, pool)                           # 2. talk; the user feels
            failures = [d.error for d in dialogues if d.end_reason == "simulator_failed"]
            if len(failures) > args.max_simulator_failures * len(dialogues):
                sampler.restore(before)                              # so that a resume meets the same people again
                if step:
                    save_checkpoint(run, step, best, args, engine, policy, tokenizer, critic, optimizers, sampler, rng)
                rank or write_transcripts(run, step + 1, dialogues)
                raise ValueError(f"step {step + 1}: {len(failures)} of {len(dialogues)} dialogues lost their simulated user, more than "
                                 f"--max-simulator-failures {args.max_simulator_failures}: {failures[0]}. All steps before are saved; "
                                 f"when it is well again: python train.py --resume {run}")
            batch = ppo.make_batch(dialogues, args.format_reward, args.reward)                       # 3. flatten
            if not batch.dialogues:
                ends = ", ".join(sorted({d.end_reason for d in dialogues}))
                raise ValueError(f"step {step + 1}: no dialogue brought a reward ({ends}); context_full: lower --max-new-tokens "
                                 f"{args.max_new_tokens}; simulator_failed: {next((d.error for d in dialogues if d.error), 'see the transcript')}")
            if args.show_tokens and step == start:
                shown = learner.estimate(critic, batch, cfg)[:2]
                rank or show_tokens(batch, chat, *shown)
            updated = time.perf_counter()
            if isinstance(engine, VLLMEngine):
                engine.sleep()
            metrics = learner.update(policy, critic, optimizers, batch, cfg, rng, ref_policy,        # 4. learn
                                     train_policy=args.algo == "grpo" or step >= args.critic_warmup)
            engine.sync(plain_weights(policy) if separate else ())
            seconds["update"] = time.perf_counter() - updated
            metrics = {"step": step + 1, **outcome(dialogues, args.format_reward, args.reward), **metrics, "lr": lr,
                       "weight_version": engine.weight_version}
            stopping = bool(ppo.over_ranks(torch.tensor([len(caught)]), "max").item())
            saving = stopping or (step + 1) % args.save_every == 0 or step + 1 == args.steps
            if saving and held_out:
                scores, talks = held_out_score(engine, chat, held_out, args, system, make_user, pool)
                metrics |= scores
                if not scores["eval_failed"]:                        # else it met other people than the steps it would be held against
                    best = max(best or (-1.0, 0), (scores["eval_emotion"], step + 1))
                rank or write_transcripts(run, step + 1, talks, "held-out")
            metrics |= summed(client.take_counts()) if client else {}
            metrics |= {f"seconds_{name}": round(value, 3) for name, value in seconds.items()}
            metrics["seconds"] = round(time.perf_counter() - began, 3)
            if rank == 0:
                log(run, metrics, dialogues)                                                         # 5. numbers and dialogues
                track(metrics)
                warn(metrics, args)
                if bar.disable:                                                                      # no terminal, so no bar
                    print(f"step {step + 1} of {args.steps}: emotion {metrics['emotion']:.1f}, success {metrics['success']:.0f} %, "
                          f"failure {metrics['failure']:.0f} %, {metrics['seconds']:.1f} s", flush=True)
            bar.set_postfix(emotion=f"{metrics['emotion']:.1f}", success=f"{metrics['success']:.0f}%", failure=f"{metrics['failure']:.0f}%",
                            generate=f"{seconds['generate']:.1f}s", simulate=f"{seconds['simulate']:.1f}s", update=f"{seconds['update']:.1f}s")
            if saving:                                                                               # 6. save
                save_checkpoint(run, step + 1, best, args, engine, policy, tokenizer, critic, optimizers, sampler, rng)
            if stopping:
                rank or leave_report(run)
                rank or print(f"stopped after step {step + 1}. Go on with: python train.py --resume {run}")
                leave_ranks()
                sys.exit(128 + (caught or [signal.SIGTERM])[0])
    rank or leave_report(run)
    rank or print(f"done. Next: python evaluate.py --model {run}")
    return run


# ---- many processes: torchrun --nproc-per-node N train.py ... ---------------------------------------------------------------

def start_ranks():
    """Join the other ranks where torchrun started this process. Returns (rank, world size)."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return ppo.ranks()


def leave_ranks():
    """Close the connections between the ranks while Python still runs: threads that outlive it can abort a rank whose work is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_rank_first(make):
    """What make() returns; the first rank makes it alone, the others find it made."""
    if ppo.ranks()[0]:
        dist.barrier()
        return make()
    made = make()
    if ppo.ranks()[1] > 1:
        dist.barrier()
    return made


def shard(model):
    """FSDP2: every rank keeps its share of each weight, gradient and optimizer state; layers are gathered one at a time.

    Outside of forward() the weights of a sharded model are whole only inside model.whole(function, *args).
    """
    if ppo.ranks()[1] == 1:
        return
    blocks = (model.model if isinstance(model, ppo.Critic) else model)._no_split_modules
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    model.whole = lambda function, *args: function(*args)
    fully_shard(model)
    register_fsdp_forward_method(model, "whole")


def summed(counts):
    """Counters of all ranks together."""
    return dict(zip(counts, ppo.over_ranks(torch.tensor([*counts.values()], dtype=torch.float64)).tolist()))


def play(engine, chat, dialogues, make_user, system, pool=None):
    """rollout() of this rank's share of the groups; then every rank gets every rank's dialogues, in place and in order."""
    rank, world = ppo.ranks()
    engines, (number, part) = world // engine.tensor_parallel, divmod(rank, engine.tensor_parallel)
    mine = [i for i, dialogue in enumerate(dialogues) if dialogue.group % engines == number and part == 0]
    if part:
        seconds = engine.follow()
    else:
        seconds = rollout(engine, chat, [dialogues[i] for i in mine], make_user, system, pool)
        if engine.tensor_parallel > 1:
            engine.dismiss()
    if world > 1:
        played = [None] * world
        dist.all_gather_object(played, [(i, dialogues[i]) for i in mine])
        for i, dialogue in sum(played, []):
            dialogues[i] = dialogue
    return seconds


def held_out_score(engine, chat, scenarios, args, system, make_user, pool):
    """One dialogue per held-out scenario, as SAGE plays them: start 40, 9 replies. Returns ({eval_failed: those without a score,
    eval_emotion, eval_success, eval_failure over the others, absent if there are none}, [Dialogue])."""
    dialogues = [Dialogue(s, args.think, seed_of("held out", args.seed, s.id), group=i, start_emotion=40, max_turns=9)
                 for i, s in enumerate(scenarios)]
    play(engine, chat, dialogues, lambda d: make_user(d.scenario, d.start_emotion, d.max_turns, d.seed), system, pool)
    engine.sync()                                    # keeps nothing of these dialogues, so a resumed run sees what this one sees
    numbers = outcome(dialogues)
    names = ("failed", "emotion", "success", "failure") if numbers["dialogues"] else ("failed",)
    return {f"eval_{name}": numbers[name] for name in names}, dialogues


@contextmanager
def catch_signals():
    """SIGINT or SIGTERM: the step is finished and saved, then the run ends. A second SIGINT exits at once. Yields what came."""
    caught = []

    def note(number, frame):
        if caught and number == signal.SIGINT:
            os._exit(130)
        caught.append(number)
        print("\nstopping: this step is finished and saved first; Ctrl-C exits at once", file=sys.stderr)
    before = [(number, signal.signal(number, note)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield caught
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def tracker(args, run):
    """A function that sends one step's metrics to --tracker."""
    if args.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(run)
        return lambda metrics: [writer.add_scalar(name, value, metrics["step"]) for name, value in metrics.items()] and writer.flush()
    if args.tracker == "wandb":
        import wandb
        wandb.init(project="rlver", name=run.name, dir=run, config=vars(args), resume="allow", id=run.name)
        return lambda metrics: wandb.log(metrics, step=metrics["step"])
    return lambda metrics: None


class Sampler:
    """Scenarios in a fresh random order each epoch, every one exactly once; its state is part of a checkpoint."""

    def __init__(self, scenarios, seed):
        self.scenarios, self.rng, self.left = scenarios, random.Random(f"sampler/{seed}"), []

    def next(self, args, step):
        """The step's dialogues, not yet played: groups of one scenario and one user for GRPO, else groups of one."""
        size = args.group_size if args.algo == "grpo" else 1
        dialogues = []
        for group in range(args.dialogues_per_step // size):
            if not self.left:
                self.left = self.rng.sample(range(len(self.scenarios)), len(self.scenarios))
            scenario = self.scenarios[self.left.pop()]
            dialogues += [Dialogue(scenario, args.think, seed_of(args.seed, step, group, member), member, group,
                                   args.start_emotion, args.max_turns) for member in range(size)]
        return dialogues

    def state(self):
        return {"left": list(self.left), "rng": self.rng.getstate()}

    def restore(self, state):
        self.left = list(state["left"])
        restore_random(self.rng, state["rng"])


def restore_random(rng, state):
    """setstate() of what getstate() gave, which JSON has turned from tuples into lists."""
    version, internal, gauss = state
    rng.setstate((version, tuple(internal), gauss))


def make_optimizers(policy, critic, args):
    def adamw(model, lr):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay)
    return {"policy": adamw(policy, args.lr)} | ({"critic": adamw(critic, args.critic_lr)} if critic is not None else {})


def add_lora(policy, rank):
    """Freeze the policy and hang trainable low-rank adapters on its linear layers (LoRA, arXiv 2106.09685; scale alpha / r = 2)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("--lora-rank needs peft: pip install peft") from None
    policy.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), policy)


def plain_weights(policy):
    """(name, tensor) of every weight as one machine and no adapters would have it: gathered from all ranks, LoRA folded in as
    W + (alpha / r) B A. One at a time: a second copy of the model is never whole. All ranks must walk through it together."""
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_" not in name:
                weight = whole(weight).detach()
                if name.endswith(".base_layer.weight"):
                    layer = policy.get_submodule(name.removesuffix(".base_layer.weight"))
                    weight = weight + layer.scaling["default"] * whole(layer.lora_B["default"].weight) @ whole(layer.lora_A["default"].weight)
                yield name.replace(".base_layer", ""), weight


def set_learning_rates(optimizers, args, step):
    """Policy: linear warm-up over --warmup-steps, then linear to --lr-end of the peak at the last step. Critic: its own warm-up, then
    constant. Returns the policy's."""
    warm = lambda steps: min(1.0, (step + 1) / max(1, steps))                  # the first step learns, unlike theirs
    decay = 1 - (1 - args.lr_end) * step / max(1, args.steps - 1)
    for name, optimizer in optimizers.items():
        lr = args.lr * (warm(args.warmup_steps) * decay) if name == "policy" else args.critic_lr * warm(args.critic_lr_warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
    return args.lr * warm(args.warmup_steps) * decay


def outcome(dialogues, format_reward=True, reward="final"):
    """What happened in the step's dialogues: points, percentages, tokens; rewards as make_batch() gives them. Failed dialogues
    are only counted."""
    played = [d for d in dialogues if not d.failed]
    turns = [turn for d in played for turn in d.turns]
    share = lambda hits, total: 100 * hits / max(1, total)
    flags = Counter(flag for turn in turns for flag in turn.reaction.flags)
    repeats = sum(turn.reply in {earlier.reply for earlier in d.turns[:k]} for d in played for k, turn in enumerate(d.turns))
    raw, gated = ([r for d in played for r in ppo.REWARDS[reward](d, checked)] for checked in (False, format_reward))
    mean = lambda values: sum(values) / max(1, len(values))
    return {"dialogues": len(played), "failed": len(dialogues) - len(played), "emotion": mean([d.emotion for d in played]),
            "success": share(sum(d.emotion >= 100 for d in played), len(played)), "failure": share(sum(d.emotion < 10 for d in played), len(played)),
            "reward_raw": mean(raw), "reward_gated": mean(gated), "turns": mean([len(d.turns) for d in played]),
            "format_rate": share(sum(t.format_ok for t in turns), len(turns)),
            "truncated": share(sum(t.finish == "length" for t in turns), len(turns)),
            "repeat_rate": share(repeats, len(turns)), "response_len": mean([len(t.ids) for t in turns]),
            **{f"flag_{name}": share(count, len(turns)) for name, count in sorted(flags.items())}}


def warn(metrics, args):
    """A run that cannot learn says so, with the setting to change."""
    if metrics["truncated"] > 50:
        tqdm.write(f"warning: {metrics['truncated']:.0f} % of replies were cut; raise --max-new-tokens {args.max_new_tokens}", file=sys.stderr)
    if metrics.get("eval_failed"):
        tqdm.write(f"warning: {metrics['eval_failed']} held-out dialogues have no score and are left out of eval_*; this step cannot be the best",
                   file=sys.stderr)
    if metrics.get("frac_zero_std_groups", 0) > 0.9:
        tqdm.write("warning: over 90 % of groups earned equal rewards and teach nothing; raise --group-size or change --difficulty", file=sys.stderr)


# ---- the run folder -----------------------------------------------------------------------------------------------------

def run_folder(args):
    if args.resume:
        return Path(args.resume)
    run = Path("runs") / (args.name or f"{args.algo}-{'think' if args.think else 'plain'}-{args.seed}")
    if (run / "config.json").exists():
        raise ValueError(f"{run} exists; choose another --name, or go on with --resume {run}")
    return run


def hold(run):
    """A lock on the run, kept until the returned file is closed or this process ends. ValueError: another process trains it."""
    run.mkdir(parents=True, exist_ok=True)
    file = open(run / ".lock", "w")
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"{run} is being trained by another process") from None
    except (ImportError, OSError):               # Windows and some file systems know no locks
        pass
    return file


def write_config(run, args):
    (run / "transcripts").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    write_whole(run / "config.json", json.dumps({name: value for name, value in vars(args).items() if name not in ("resume", "override")},
                                                indent=1, ensure_ascii=False) + "\n")


def args_of_run(args, given):
    """The flags of the run to resume. A flag given beside --resume must have the run's value or be named by --override."""
    config = Path(args.resume) / "config.json"
    if not config.exists():
        raise ValueError(f"{args.resume}: no run there (config.json is missing); start one without --resume")
    try:
        stored = json.loads(config.read_bytes())
        stored["algo"]                           # TypeError, KeyError: it is no object, or none of ours
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{config}: not the flags of a run ({type(error).__name__}: {error}); restore it, or start a new run") from None
    for name, default in vars(args).items():
        if None not in (default, stored.get(name)) and type(stored[name]) not in (type(default), int):
            raise ValueError(f"{config}: {name} cannot be {stored[name]!r}; restore it, or start a new run")
    saved = vars(args) | stored
    free = {"resume", "override", *(name.strip().replace("-", "_") for name in args.override.split(","))}
    for name in sorted(given.keys() - free):
        if given[name] != saved[name]:
            flag = name.replace("_", "-")
            raise ValueError(f"{args.resume} runs with --{flag} {saved[name]}, not {given[name]}; leave it out, or add --override {flag}")
    return argparse.Namespace(**saved | {name: given[name] for name in given.keys() & free})


def log(run, metrics, dialogues):
    metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}     # NaN is no JSON
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")
    write_transcripts(run, metrics["step"], dialogues)


def write_transcripts(run, step, dialogues, kind="step"):
    write_whole(run / "transcripts" / f"{kind}-{step:06d}.jsonl",
                "".join(json.dumps(d.to_dict(), ensure_ascii=False) + "\n" for d in dialogues))


def leave_report(run):
    """report.html of all that the run has; a page that cannot be written does not fail a run that is saved."""
    import report  # here: only a run's end needs it
    try:
        print(f"report     {report.write_report(run)}")
    except (ValueError, OSError) as error:
        print(f"warning: no report: {error}", file=sys.stderr)


def save_checkpoint(run, step, best, args, engine, policy, tokenizer, critic, optimizers, sampler, rng):
    """A Hugging Face folder, plus trainer/ with all that a resume needs (plain tensors: nothing is unpickled); it appears whole
    or not at all. Then old ones go: the newest --keep stay, and the best one on --eval-scenarios. Every rank must call it."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    lead = ppo.ranks()[0] == 0
    weights = {name: weight.cpu() for name, weight in plain_weights(policy) if lead}
    adapter = {name: whole.cpu() for name, whole in get_model_state_dict(policy, options=full).items() if ".lora_" in name} if args.lora_rank else {}
    models = {"policy": policy, "critic": critic}
    # an optimizer that has not stepped yet (--critic-warmup) holds nothing; asking for its state would make it step
    tensors = {f"optimizer_{name}": get_optimizer_state_dict(models[name], optimizer, options=full) if optimizer.state else None
               for name, optimizer in optimizers.items()}
    tensors |= {"critic": get_model_state_dict(critic, options=full) if critic is not None else None, "torch_rng": torch.get_rng_state()}
    if not lead:
        return

    def trainer_state(folder):
        (folder / "trainer").mkdir()
        if adapter:                                  # in peft's format: PeftModel.from_pretrained(base, folder / "adapter")
            policy.peft_config["default"].save_pretrained(folder / "adapter")
            save_file({f"base_model.model.{name.replace('.default', '')}": weight.contiguous() for name, weight in adapter.items()},
                      folder / "adapter" / "adapter_model.safetensors")
        (folder / "trainer" / "state.json").write_text(json.dumps(
            {"step": step, "best": best, "weight_version": engine.weight_version, "sampler": sampler.state(),
             "rng": rng.getstate()}))
        torch.save(tensors, folder / "trainer" / "state.pt")

    folder = run / "checkpoints" / f"step-{step:06d}"
    try:
        save_policy(policy, tokenizer, folder, trainer_state, weights, think=args.think, temperature=args.temperature,
                    max_new_tokens=args.max_new_tokens)
    except Exception as error:                       # a full disk speaks through OSError, RuntimeError (torch) or SafetensorError
        shutil.rmtree(folder.with_name(folder.name + ".partial"), ignore_errors=True)
        raise ValueError(f"{folder} could not be written ({' '.join(str(error).split())[:200]}); earlier checkpoints are whole: make room, "
                         f"then python train.py --resume {run}") from error
    kept = {f"step-{best[1]:06d}"} if best else set()
    for old in checkpoints(run)[:-args.keep]:
        if old.name not in kept:
            shutil.rmtree(old.rename(old.with_name(old.name + ".partial")))


def checkpoints(run):
    """Whole checkpoints, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-*[0-9]") if (p / "trainer" / "state.pt").exists())


def load_weights(run, policy, critic):
    """Put the newest whole checkpoint's critic and adapter into the models (a policy without adapter was loaded from it).
    Returns its other tensors; None where the run stopped before its first checkpoint."""
    paths = checkpoints(run)
    if not paths:
        if broken := [path.name for path in (run / "checkpoints").glob("step-*[0-9]")]:
            raise ValueError(f"{run}: no checkpoint is whole ({broken[0]} lacks trainer/state.pt); start again under another --name")
        forget_after(run, 0)
        return None
    if (adapter := paths[-1] / "adapter" / "adapter_model.safetensors").exists():
        found = load_file(adapter)
        policy.load_state_dict({name: found[f"base_model.model.{name.replace('.default', '')}"]
                                for name, _ in policy.named_parameters() if ".lora_" in name}, strict=False)
    try:
        tensors = torch.load(paths[-1] / "trainer" / "state.pt", weights_only=True, mmap=True)
        json.loads((paths[-1] / "trainer" / "state.json").read_text())
    except Exception as error:                                       # torch's unpickler has many
        raise ValueError(f"{paths[-1]}: broken ({str(error).splitlines()[0]}); remove this folder to go on from the one before") from None
    if critic is not None:
        critic.load_state_dict(tensors["critic"])
    return tensors


def forget_after(run, step):
    """Drop the numbers and dialogues of steps after `step`: they belong to weights that are lost."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines()[:step] if log.exists() else []
    if lines:
        write_whole(log, "".join(line + "\n" for line in lines))
    else:
        log.unlink(missing_ok=True)
    for kind in ("step", "held-out"):
        for path in (run / "transcripts").glob(f"{kind}-*.jsonl"):
            if path.name > f"{kind}-{step:06d}.jsonl":
                path.unlink(missing_ok=True)


def load_progress(run, tensors, policy, critic, optimizers, sampler, rng):
    """Restore optimizers and every random state, and forget what was logged after the checkpoint. Returns its step, the best
    (score, step) so far, and the engine's weight version."""
    state = json.loads((checkpoints(run)[-1] / "trainer" / "state.json").read_text())
    for name, optimizer in optimizers.items():
        if tensors[f"optimizer_{name}"]:
            set_optimizer_state_dict({"policy": policy, "critic": critic}[name], optimizer, tensors[f"optimizer_{name}"],
                                     options=StateDictOptions(full_state_dict=True))
    torch.set_rng_state(tensors["torch_rng"])
    sampler.restore(state["sampler"])
    restore_random(rng, state["rng"])
    if ppo.ranks()[0] == 0:
        forget_after(run, state["step"])
    return state["step"], state["best"] and tuple(state["best"]), state["weight_version"]


def introduce(args, run, policy, engine, scenarios, world, start):
    name = "vLLM" if isinstance(engine, VLLMEngine) else "transformers"
    size, trained = (sum(p.numel() for p in policy.parameters() if p.requires_grad or every) / 1e6 for every in (True, False))
    user = (f"scripted, {args.difficulty}: no LLM, rules only; its scores are not the paper's   change: --simulator --difficulty"
            if args.simulator == "scripted" else f"{args.simulator_model} at {args.simulator_url}, {args.difficulty}, "
            f"{args.simulator_format}   change: --simulator-model --simulator-url")
    print(f"policy     {args.model} ({size:.1f}M parameters, {trained:.1f}M trained)   change: --model --lora-rank\n"
          f"user       {user}\n"
          f"scenarios  {args.scenarios} ({len(scenarios)})   change: --scenarios\n"
          f"engine     {name} on {policy.device}, {torch.get_num_threads()} threads, {world} process{'es' if world > 1 else ''}   "
          "change: --engine --threads, torchrun --nproc-per-node N train.py ...\n"
          f"learner    {args.algo}, {args.steps} steps of {args.dialogues_per_step} dialogues, preset {args.preset}   change: --algo --steps\n"
          f"run        {run}{f', goes on after step {start}' if start else ''}")


if __name__ == "__main__":
    try:
        main()
        leave_ranks()
    except KeyboardInterrupt:                        # before the first step; later catch_signals() is there
        print("train.py: stopped; nothing was trained in this call", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 or dist.is_initialized():       # before the ranks have met all find the same error: one line is enough
            print(f"train.py: error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
        sys.exit(2)
