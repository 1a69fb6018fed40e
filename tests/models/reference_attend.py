"""The plainest right attention: one sequence, K and V as growing tensors, softmax written out."""

import torch

from engine.kernels.paged_attention import Softmax
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents, RotatedLatents, TokenChooser
from engine.layers.rope import Unturned
from engine.models.decoder import DenseDecoder
from engine.models.vision.tower import NO_IMAGES, StepImages


class Sequence:
    """One request's cache and the model behind it. `kv`: layer -> (K, V), each [length, Hkv, D], for tests to damage."""

    def __init__(self, model: DenseDecoder) -> None:
        self._model = model
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._length = 0
        self._states: StatePool | None = None
        if specs := model.state_specs():
            self._states = StatePool(specs, num_slots=2, device="cpu")
            model.use_states(self._states)

    def extend(
        self, ids: list[int], *, positions: torch.Tensor | None = None, images: StepImages = NO_IMAGES
    ) -> torch.Tensor:
        """Run `ids` behind what came before; logits [len(ids), vocab]. `positions`: of RoPE, where they are not those of the tokens."""
        with torch.inference_mode():
            return self._model.logits(self.hidden(ids, positions=positions, images=images))

    def hidden(
        self, ids: list[int], *, positions: torch.Tensor | None = None, images: StepImages = NO_IMAGES
    ) -> torch.Tensor:
        """As `extend`; the model's hidden states [len(ids), H]."""
        if positions is None:
            positions = torch.arange(self._length, self._length + len(ids))
        if self._states is not None:
            self._states.step = self._step(len(ids))
        hidden = self._model.forward(torch.tensor(ids), positions, self._attend, images)
        self._length += len(ids)
        return hidden

    def _step(self, count: int) -> StepBatch:
        """As recurrent layers see it: the states are in slot 2. One token behind others is one of an answer."""
        none = torch.zeros(0, dtype=torch.int64)
        return StepBatch(
            extend=count > 1 or self._length == 0,
            q_lens=[count],
            kv_lens=[self._length + count],
            page_table=none,
            slots=none,
            token_pages=none,
            token_offsets=none,
            riders=[],
            state_slots=[2],
        )

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Run the prompt `ids`, then `count` greedy tokens (no stop at <eos>)."""
        tokens = [int(self.extend(ids)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.extend(tokens[-1:])[-1].argmax()))
        return tokens

    def _attend(self, layer: int, given: Unturned | NewLatents) -> torch.Tensor:
        if isinstance(given, NewLatents):
            new = given.rotated()
            if new.chooser is not None:
                return self._attend_chosen(layer, new, new.chooser)
            k = new.latents.unsqueeze(1)
            rank = self._model.cache_specs()[layer].latent
            return self._attend_heads(layer, new.q, k, k[:, :, :rank], Softmax(new.scale))
        return self._attend_heads(layer, *given.turned(), given.softmax)

    def _attend_chosen(self, layer: int, new: RotatedLatents, chooser: TokenChooser) -> torch.Tensor:
        """Row by row, by the definition: the best of the tokens before."""
        rank, dim = self._model.cache_specs()[layer].latent, new.q.shape[2]
        before = self.kv[layer][0] if layer in self.kv else new.latents[:0]
        kept = torch.cat((before, new.latents))
        self.kv[layer] = (kept, kept)
        out = []
        for row, (q, index_q) in enumerate(zip(new.q, chooser.q, strict=True)):
            seen = kept[: len(before) + row + 1]
            scores = ((seen[:, dim:] @ index_q.T).relu() @ chooser.weights[row]).tolist()
            best = sorted(range(len(seen)), key=lambda token: (-scores[token], token))[: chooser.chosen]
            weights = (q @ seen[best, :dim].T * new.scale).softmax(-1)
            out.append((weights @ seen[best, :rank]).flatten())
        return torch.stack(out)

    def _attend_heads(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        ahead, window = len(k) - len(q), self._model.cache_specs()[layer].window
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(ahead)
        if window:
            seen = seen.triu(ahead - window + 1)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax.scale
        if softmax.cap:
            scores = (scores / softmax.cap).tanh() * softmax.cap
        scores = scores.masked_fill(~seen, -torch.inf)
        if softmax.sinks is not None:
            sinks = softmax.sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.float().softmax(-1).to(v.dtype)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
