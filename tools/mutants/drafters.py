"""Bugs of drafters in the executor, which tests of drafters that are right must find: tokens stay as they are, and drafts are wrong."""

from dataclasses import replace

import torch
from msgspec import structs

from engine.executor import draft_rows
from engine.executor.draft_pass import DraftPass
from engine.executor.guess_pass import GuessPass
from engine.layers.norm import rms_norm
from engine.model_files import drafter_config
from engine.models.eagle import EagleLayer
from engine.models.nextn import NextnLayer
from engine.models.part import ModelPart
from engine.sampler.sampler import Sampler
from tools.mutants.planting import Bugs

DRAFTERS = Bugs()
_RIGHT, _HYBRID = "tests/engine/test_eagle.py", "tests/engine/test_mtp_of_hybrids.py"
_TREES = "tests/engine/test_draft_trees.py"
FINDERS = (
    "tests/models/test_draft_models.py",
    "tests/models/test_drafters_see.py",
    f"{_RIGHT}::test_behind_rejected_drafts_the_next_ones_are_right",
    f"{_RIGHT}::test_a_drafter_that_is_right_gives_all_that_a_step_can_hold",
    f"{_RIGHT}::test_prefixes_bring_their_tails",
    f"{_HYBRID}::test_behind_rejected_drafts_the_next_ones_are_right",
    f"{_HYBRID}::test_prefixes_bring_their_tails",
    f"{_TREES}::test_a_path_beside_the_first_one_counts_and_comes_to_its_place",
    f"{_TREES}::test_any_sampling_gives_the_tokens_of_plain_decoding",
    f"{_TREES}::test_what_the_drafter_keeps_is_that_of_chains",
    f"{_TREES}::test_each_guess_follows_its_own_path",
    "tests/engine/test_standalone_drafter.py::test_the_model_itself_is_always_right",
    "tests/e2e/test_drafters.py::test_a_handed_over_prompt_is_drafted_as_well_as_ones_own",
)


# ---- tails


@DRAFTERS.bug("the tail is stale", DraftPass._keep_tails, "Steps of one token keep no tail.")
def _(original, drafts, runs, starts, items, features):
    original(drafts, [run for run in runs if items[run[0]].extend], starts, items, features)


@DRAFTERS.bug("the tail is that of a rejected draft", draft_rows._with_all_before, "Every draft passes for accepted.")
def _(original, right, parents, deepest):
    return torch.ones_like(original(right, parents, deepest))


@DRAFTERS.bug(
    "the tail is that of the token known before", draft_rows._with_all_before, "No draft passes for accepted."
)
def _(original, right, parents, deepest):
    return original(right, parents, deepest) & (parents == torch.arange(len(parents)))


@DRAFTERS.bug(
    "other ranks keep other tails", draft_rows.judged_rows, "A rank that samples nothing takes no draft for right."
)
def _(original, items, tokens, *, collectives, device):
    rows = original(items, tokens, collectives=collectives, device=device)
    known = rows.parents == torch.arange(len(rows.parents))
    return replace(rows, right=rows.right & known) if tokens is None else rows


@DRAFTERS.bug("whole pages of a chunk have no tail", DraftPass._page_ends, "Only the newest page's is kept.")
def _(original, drafts, item):
    return original(drafts, item)[-1:]


@DRAFTERS.bug(
    "the tail is lost at a hand-over",
    DraftPass.draft,
    "Drafts behind tokens that this engine has not computed begin from nothing.",
)
def _(original, drafts, model, items):
    for item in items:
        if item.output_len == 1 and item.new_pages and drafts._tails is not None:
            slots, before = drafts._ids([item.slot]), drafts._ids([item.start - 1])
            pages = drafts._page_table.locate(slots, before)[0]
            drafts._tails.write(pages, torch.zeros_like(drafts._tails.before(slots, before)))
    return original(drafts, model, items)


# ---- entries


@DRAFTERS.bug("entries are one token off", DraftPass._before, "A token's entry has its own hidden state.")
def _(original, drafts, items, starts, features):
    return features


@DRAFTERS.bug("a chunk begins from nothing", DraftPass._before, "The first entry of a step reads no tail.")
def _(original, drafts, items, starts, features):
    before = original(drafts, items, starts, features)
    before[[starts[i] for i, item in enumerate(items) if not item.draft]] = 0
    return before


@DRAFTERS.bug(
    "entries of verified rows are not kept", DraftPass.end, "Steps with drafts leave what the drafter had guessed."
)
def _(original, drafts, batch, hidden):
    if not batch.rows.step.drafts:
        original(drafts, batch, hidden)


@DRAFTERS.bug("a pass reads one entry too few", GuessPass._step, "It does not see the token it is behind.")
def _(original, passes, paths, own, places, number):
    step = original(passes, paths, own, places, number)
    step.kv_lens = [max(1, length - 1) for length in step.kv_lens]
    return step


@DRAFTERS.bug("a pass writes over the entry before", GuessPass._step, "KV of drafts lies one token early.")
def _(original, passes, paths, own, places, number):
    return original(passes, paths, (own - 1).clamp_min(0), places, number)


# ---- trees


DRAFTERS.skip("what counts stays where the tree had it", DraftPass._move, "Its own place has the KV of another guess.")


@DRAFTERS.bug(
    "rows of a tree see the first path", draft_rows.paths_of, "All tokens are looked for in their own places."
)
def _(original, items, device):
    paths = original(items, device)
    return replace(paths, starts=torch.tensor([item.kv_len for item in items], dtype=torch.int32))


@DRAFTERS.bug("a guess follows the row before it", DraftPass._before, "Not the row that it is a guess behind.")
def _(original, drafts, items, starts, features):
    return original(drafts, [structs.replace(i, behind=min(i.behind, 1)) for i in items], starts, features)


@DRAFTERS.bug("passes see other paths", GuessPass._mapping, "Entries lie where the first path would have them.")
def _(original, passes, paths, places):
    mapping = original(passes, paths, places)
    depths = torch.arange(places.shape[2], dtype=torch.int32)
    return replace(mapping, places=mapping.starts[:, None] + depths)


# ---- what is computed


@DRAFTERS.bug("drafts are greedy", Sampler.guess, "Whatever temperature the request has.")
def _(original, sampler, logits, slots, output_lens):
    return logits.argmax(-1)


@DRAFTERS.bug("drafts have the noise of the token before", Sampler.guess, "Seeds are taken at the last position.")
def _(original, sampler, logits, slots, output_lens):
    return original(sampler, logits, slots, [n - 1 for n in output_lens])


@DRAFTERS.bug("MTP reads the hidden state first", NextnLayer.forward, "The halves of eh_proj are exchanged.")
def _(original, layer, ids, features, positions, attend, images=None):
    join, half = layer._join, features.shape[1]
    layer._join = lambda both: join(both.roll(half, 1))
    try:
        return original(layer, ids, features, positions, attend, images)
    finally:
        layer._join = join


@DRAFTERS.bug("a hybrid's MTP reads the hidden state first", NextnLayer.forward, "The halves of mtp.fc are exchanged.")
def _(original, layer, ids, features, positions, attend, images=None):
    join, half = layer._join, features.shape[1]
    layer._join = (lambda both: join(both.roll(half, 1))) if layer._model.state_specs() else join
    try:
        return original(layer, ids, features, positions, attend, images)
    finally:
        layer._join = join


@DRAFTERS.bug("MTP sees no image", NextnLayer.forward, "Its tokens have the embeddings of the table.")
def _(original, layer, ids, features, positions, attend, images=None):
    return original(layer, ids, features, positions, attend)


@DRAFTERS.bug("a hybrid's MTP norms add no 1", ModelPart.norm, "They are plain ones, as those of DeepSeek's MTP.")
def _(original, part, name):
    if not name.startswith("mtp."):
        return original(part, name)
    return rms_norm(part.vector(f"{name}.weight"), eps=part.config.rms_norm_eps, offset=0.0)


@DRAFTERS.bug(
    "a hybrid's MTP goes on from states without norm", NextnLayer.forward, "A pass gives what its layer adds."
)
def _(original, layer, ids, features, positions, attend, images=None):
    norm = layer._norm
    layer._norm = _Sum() if layer._model.state_specs() else norm
    try:
        return original(layer, ids, features, positions, attend, images)
    finally:
        layer._norm = norm


class _Sum:
    def of_sum(self, x, delta):
        return x + delta


@DRAFTERS.bug("EAGLE-3 goes on from normed states", EagleLayer.forward, "A further pass reads what the head reads.")
def _(original, layer, ids, features, positions, attend, images=None):
    rows = original(layer, ids, features, positions, attend, images)
    return layer._norm(rows) if layer._reads_inside else rows


@DRAFTERS.bug("EAGLE-3 reads a layer too early", drafter_config._inside, "What layers begin from, not what they give.")
def _(original, fields, model):
    return tuple(layer - 1 for layer in original(fields, model))
