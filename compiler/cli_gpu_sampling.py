"""The kernels that choose on a card, one by one against law L1 in numpy (runtime/sampling/oracle.py), with all that a request may ask for.

Each is compared on what the one before it left in memory: edited logits, where top_k and top_p cut, the best of each part of the
vocabulary, the choice, log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mlsdc.runtime.bench.rig import Rig
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_program import CudaProgram
from mlsdc.runtime.program import IntArg, Launch
from mlsdc.runtime.sampling import oracle
from mlsdc.runtime.sampling import record as R
from mlsdc.runtime.sampling.noise import gumbel
from mlsdc.runtime.sampling_params import Grammar, SamplingParams
from mlsdc.runtime.step import Array, Header
from mlsdc.targets.nvidia_values import arena_of, argument
from mlsdc.templates.params_triton_rows import PART

SEED = 0x9E3779B97F4A7C15
FLOAT = 1e-6  # of a logit, once f64 was rounded to f32; of a log probability ten times that
SCORE = 1e-9  # of (x - best) / T + noise, f64
CUT_OFF = -42.0  # templates/triton/sample_part: a score's first term below which noise cannot lift it over the best token's
BIAS, BANS, SHARE = 16, 5, 0.7  # tokens of a logit_bias, end tokens, share of the tokens that a mask allows

_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4}
_CUTS: dict[str, Any] = {"top_k": 60, "top_p": 0.9, "min_p": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "drawn": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 40, "logprobs": 0},
    "top_p": {"temperature": 1.5, "top_p": 0.95},
    "edited": {"temperature": 1.0, **_PENALTIES, "min_tokens": 1 << 20, "logit_bias": {}},
    "edited, greedy": {"temperature": 0.0, **_PENALTIES, "logit_bias": {}},
    "everything": {"temperature": 0.9, **_CUTS, **_PENALTIES, "logit_bias": {}, "grammar": Grammar("json_object"), "logprobs": 20,
                   "prompt_logprobs": 3},
}

Found = tuple[str, str, float, float]  # kernel, where it was compared (what was asked for, a node), error, what is allowed


def sampling_lines(rig: Rig) -> Iterator[Found]:
    """Of the step that is set, whose forward pass ran last."""
    level, buffers = rig.memory, rig.memory.buffers
    assert isinstance(level, CudaLevel)
    logits = rig.forward.tap("logits")[: int(buffers.header[Header.OUT]), : rig.manifest.model.vocab_size].copy()
    at = level.inputs + level.places["choices"]
    greedy = level.device.download(at, 4 * len(logits)).view(np.int32)
    for case, asked in CASES.items():
        ask(rig, asked)
        level.device.upload(at, greedy)  # what the forward pass chose, again
        level.programs["sample"].run()
        with np.errstate(all="ignore"):  # logits that are no numbers have been found by then
            found = list(compared(rig, logits, greedy))
        yield from ((kernel, f"choices: {case}", error, allowed) for kernel, error, allowed in found)


def ask(rig: Rig, asked: dict[str, Any]) -> None:
    """The record, counts, mask and given tokens of the step's one sequence, as a request with these parameters would set them."""
    buffers, rng, vocab = rig.memory.buffers, np.random.default_rng(5), rig.manifest.model.vocab_size
    tokens = rng.integers(0, vocab, int(buffers.seq_ctx[0]) + 1).tolist()
    if "logit_bias" in asked:
        asked = {**asked, "logit_bias": dict(zip(rng.choice(vocab, min(BIAS, vocab), replace=False).tolist(),
                                                 rng.normal(0, 5, BIAS).tolist(), strict=False))}
    ends = frozenset(rng.choice(vocab, min(BANS, vocab), replace=False).tolist())
    R.Sampler(SamplingParams(**asked), SEED, len(tokens) // 2, ends).write(buffers, 0, tokens)
    out = int(buffers.header[Header.OUT])
    buffers.given[:out] = R.OF_CHOICE if "logprobs" in asked else R.NO_LOGPROBS
    if "prompt_logprobs" in asked:
        buffers.given[: out // 2] = rng.integers(0, vocab, out // 2)
    if "grammar" in asked:
        allowed = rng.random((out, 32 * buffers.masks.shape[1])) < SHARE
        buffers.masks[:out] = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)


def compared(rig: Rig, logits: Array, greedy: Array) -> Iterator[tuple[str, float, float]]:
    """(kernel, error, allowed) of each kernel, over all rows."""
    level = rig.memory
    assert isinstance(level, CudaLevel)
    program = level.programs["sample"]
    assert isinstance(program, CudaProgram)
    launches = {bound.launch.kernel.partition("_n")[0]: bound.launch for bound in program.launches}
    buffers, rows = level.buffers, len(logits)
    edit, part = launches["sample_edit"], launches["sample_part"]
    parts = part.grid
    best = load(level, edit, "best_ptr", rows, np.int32)
    x = edited_logits(level, edit, logits, int(rig.program.taps["logits"].shape[1]))
    last_x, last = load(level, part, "last_x_ptr", rows, np.float32), load(level, part, "last_ptr", rows, np.int32)
    scores = load(level, part, "score_ptr", rows * parts, np.float64).reshape(rows, parts)
    index = load(level, part, "index_ptr", rows * parts, np.int32).reshape(rows, parts)
    errors = {name: [0.0] for name in launches}
    ids = np.arange(logits.shape[1])
    for out in range(rows):
        row = int(buffers.out_rows[out])
        record = buffers.sampling[0]
        words, t = record.view(np.int32), int(buffers.positions[row]) + 1
        if words[R.FLAGS] & R.EDIT:
            wanted = oracle.edited(buffers, row, 0, logits[out], t)
            errors["sample_edit"] += [apart(x[out], wanted), float(best[out] != np.argmax(x[out]))]
        else:
            errors["sample_edit"].append(float(best[out] != greedy[out]))
        chosen = int(best[out])
        if not 0 <= chosen < logits.shape[1]:
            errors["sample_edit"].append(np.inf)  # and nothing behind it has anything to start from
            continue
        if record[R.INV_T] > 0:
            with np.errstate(invalid="ignore"):
                z = (x[out].astype(np.float64) - np.float64(x[out, best[out]])) * record[R.INV_T]
            kept = (x[out] > -np.inf) & ((x[out] > last_x[out]) | ((x[out] == last_x[out]) & (ids <= last[out])))
            survive = oracle.survivors(x[out], z, int(words[R.TOP_K]), float(record[R.TOP_P]), -np.inf)
            errors["sample_bound"].append(len(np.setxor1d(ids[kept], survive)) / max(1, len(survive)))
            able = ids[kept & (z >= record[R.LOG_MIN_P]) & (z > CUT_OFF)]
            errors["sample_part"].append(of_parts(able, z, t, scores[out], index[out]))
            if np.isnan(scores[out]).any():
                errors["sample_part"].append(np.inf)
                continue
            chosen = int(index[out][scores[out] == scores[out].max()].min())
        errors["sample_join"].append(float(buffers.choices[out] != chosen))
        errors["sample_logprobs"].append(logprob_error(rig, out, logits[out], words))
    allowed = {"sample_edit": FLOAT, "sample_part": SCORE, "sample_logprobs": 10 * FLOAT}
    for name, launch in launches.items():
        yield launch.kernel, max(errors[name]), allowed.get(name, 0.0)


def load(level: CudaLevel, launch: Launch, name: str, count: int, dtype: Any) -> Array:
    """What a kernel left where a parameter of it points."""
    return level.device.download(arena_of(level, launch, name), count * np.dtype(dtype).itemsize).view(dtype)


def edited_logits(level: CudaLevel, edit: Launch, logits: Array, columns: int) -> Array:
    """The rows that kernels choose from: the forward pass's, or edited copies behind them."""
    if not level.buffers.sampling[0].view(np.int32)[R.FLAGS] & R.EDIT:
        return logits
    behind = argument(level, edit, "edited")
    assert isinstance(behind, IntArg)
    at = arena_of(level, edit, "x_ptr") + 4 * behind.int
    return level.device.download(at, 4 * len(logits) * columns).view(np.float32).reshape(len(logits), columns)[:, : logits.shape[1]]


def of_parts(able: Array, z: Array, t: int, scores: Array, index: Array) -> float:
    """The largest difference of a part's best score; infinite where another token has it."""
    noisy = np.full(len(z), -np.inf)
    noisy[able] = z[able] + gumbel(SEED, t, able)
    worst = 0.0
    for part, start in enumerate(range(0, len(z), PART)):
        mine = noisy[start : start + PART]
        top = float(mine.max())
        if not np.isfinite(top):
            worst = max(worst, 0.0 if scores[part] == -np.inf else np.inf)
        elif start + int(mine.argmax()) != index[part]:
            worst = np.inf
        else:
            worst = max(worst, abs(top - float(scores[part])))
    return float(np.nan_to_num(worst, nan=np.inf))


def logprob_error(rig: Rig, out: int, logits: Array, words: Array) -> float:
    """Of a row that asked for log probabilities: the largest difference; infinite for other tokens."""
    buffers = rig.memory.buffers
    given = int(buffers.given[out])
    wanted = int(words[R.PROMPT_LOGPROBS if given >= 0 else R.LOGPROBS]) if given != R.NO_LOGPROBS else -1
    if wanted < 0:
        return 0.0
    token = given if given >= 0 else int(buffers.choices[out])
    if not 0 <= token < len(logits):
        return np.inf
    ids, values = oracle.logprobs(logits, token, wanted)
    if buffers.logprob_ids[out, : len(ids)].tolist() != ids:
        return np.inf
    return apart(buffers.logprobs[out, : len(ids)], np.array(values))


def apart(found: Array, wanted: Array) -> float:
    """The largest difference relative to the largest element; infinite where one is -inf and the other is not."""
    there = np.isfinite(wanted)
    if not np.array_equal(np.isfinite(found), there):
        return np.inf
    off, top = np.abs(found[there].astype(np.float64) - wanted[there]), np.abs(wanted[there])
    return float(off.max(initial=0.0) / max(1e-30, float(top.max(initial=0.0))))
