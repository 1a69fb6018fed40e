"""What drafters compute, a whole prompt and then passes one by one, is what their layers compute in transformers, fp32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.model_files.drafter_config import EAGLE, EAGLE3, NEXTN, DrafterConfig, load_eagle, nextn_of
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftEntries
from engine.models.load import load_model
from engine.models.vision.tower import NO_IMAGES, ImageRows, StepImages
from service.flags import ConfigError
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import HYBRIDS, edit_tensors, make_tiny_checkpoint
from tests.models.tiny_drafters import INSIDE, make_tiny_eagle
from tests.models.tiny_seeing import IMAGE, with_mtp

IDS = [20 + i * i % 101 for i in range(40)]
PASSES = 3
TOLERANCE = 1e-4


def load(path: str, drafter: DrafterConfig | None) -> DenseDecoder:
    config = load_model_config(path)
    return load_model(path, config, dtype="float32", device="cpu", progress=False, drafter=drafter)


def of_the_engine(model: DenseDecoder) -> list[Tensor]:
    """Logits behind the last of IDS, and behind PASSES - 1 drafts of it."""
    drafter, attend, found = model.drafter, Sequence(model)._attend, []
    assert drafter is not None
    with torch.inference_mode():
        features = drafter.features(Sequence(model).hidden(IDS))
        assert features is not None
        features = torch.cat((torch.zeros_like(features[:1]), features[:-1]))
        ids, positions = torch.tensor(IDS), torch.arange(len(IDS))
        for _ in range(PASSES):
            features = drafter.forward(DraftEntries(ids, features, positions), attend)[-1:]
            logits = drafter.logits(features)
            assert logits is not None
            found.append(logits[0].clone())
            ids, positions = found[-1].argmax()[None], positions[-1:] + 1
    return found


def check(found: list[Tensor], reference: "Reference") -> None:
    """The reference computes all of the sequence in each pass."""
    ids, features = list(IDS), reference.features()
    for logits in found:
        out = reference.layer(reference.embeddings(ids), features)
        wanted = reference.logits(out[-1])
        size = float(wanted[wanted.isfinite()].abs().max())  # EAGLE's layer has no last norm: its logits grow
        assert torch.allclose(logits, wanted, atol=TOLERANCE * max(1.0, size), rtol=0.0)
        ids.append(int(wanted.argmax()))
        features = torch.cat((features, out[-1:]))


class Reference:
    def __init__(self, model_path: str, tensors: dict[str, Tensor]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.tensors = tensors
        with torch.inference_mode():
            self.seen = self.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states

    def shifted(self, states: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(states[:1]), states[:-1]))

    def features(self) -> Tensor:
        """Of the tokens before each of IDS: the states behind the last norm."""
        return self.shifted(self.seen[-1][0])

    def embeddings(self, ids: list[int]) -> Tensor:
        found: Tensor = self.model.get_input_embeddings()(torch.tensor(ids))
        return found

    def layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, row: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(row)
        return found

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], eps)


class NextnReference(Reference):
    """The layer as the only one of a model of its own, fed with embeddings."""

    def __init__(self, model_path: str, other: Path) -> None:
        source = Path(model_path)
        config = json.loads((source / "config.json").read_text())
        self.index = config["num_hidden_layers"]
        super().__init__(model_path, load_file(source / "model.safetensors"))
        other.mkdir()
        config |= {"num_hidden_layers": self.index + 1, "num_nextn_predict_layers": 0}
        (other / "config.json").write_text(json.dumps(config))
        (other / "model.safetensors").symlink_to(source / "model.safetensors")
        self.inner = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval().model
        self.inner.layers = nn.ModuleList([self.inner.layers[self.index]])
        self.inner.config.num_hidden_layers = 1
        self.eps = config["rms_norm_eps"]
        self.inner.norm.weight.data = self.of("shared_head.norm")

    def of(self, name: str) -> Tensor:
        return self.tensors[f"model.layers.{self.index}.{name}.weight"]

    def layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        parts = [
            rms_norm(x, x.shape[-1:], self.of(name), self.eps) for x, name in ((embedded, "enorm"), (features, "hnorm"))
        ]
        joined = linear(torch.cat(parts, 1), self.of("eh_proj"))
        found: Tensor = self.inner(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return found


class HybridReference(Reference):
    """The layer as the only one of a hybrid without recurrent layers, fed with embeddings. Its norms add 1 to their weights."""

    def __init__(self, model_path: str, other: Path) -> None:
        source = Path(model_path)
        super().__init__(model_path, load_file(source / "model.safetensors"))
        config = json.loads((source / "config.json").read_text())
        other.mkdir()
        config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        (other / "config.json").write_text(json.dumps(config))
        own = {
            name.replace("mtp.", "model.", 1): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(("mtp.layers.0.", "mtp.norm.", "model.embed_tokens.", "lm_head."))
        }
        save_file(own, other / "model.safetensors", metadata={"format": "pt"})
        self.inner = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval().model
        self.eps = config["rms_norm_eps"]

    def added(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], 1.0 + self.tensors[f"mtp.{name}.weight"], self.eps)

    def layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        both = self.added("pre_fc_norm_embedding", embedded), self.added("pre_fc_norm_hidden", features)
        joined = linear(torch.cat(both, 1), self.tensors["mtp.fc.weight"])
        found: Tensor = self.inner(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return found


class EagleReference(Reference):
    """`attention`: of transformers' Llama, with the weights of the drafter."""

    def __init__(self, model_path: str, path: str) -> None:
        super().__init__(model_path, load_file(Path(path) / "model.safetensors"))
        fields = json.loads((Path(path) / "config.json").read_text())
        config = LlamaConfig(**{name: value for name, value in fields.items() if name != "architectures"})
        self.eps, self.inner = config.rms_norm_eps, LlamaForCausalLM(config).eval().model
        self.prefix = "layers.0" if "layers.0.self_attn.q_proj.weight" in self.tensors else "midlayer"
        layer = self.inner.layers[0]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = self.tensors[f"{self.prefix}.self_attn.{name}.weight"]
            getattr(layer.self_attn, name).weight = nn.Parameter(weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight = nn.Parameter(self.tensors[f"{self.prefix}.mlp.{name}.weight"])

    def features(self) -> Tensor:
        if self.prefix == "layers.0":
            return super().features()
        states = [self.seen[layer + 1][0] for layer in INSIDE]
        return self.shifted(linear(torch.cat(states, 1), self.tensors["fc.weight"]))

    def layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        if self.prefix == "layers.0":
            fc = self.tensors["fc.weight"], self.tensors["fc.bias"]
            x = read = linear(torch.cat((embedded, features), 1), *fc)
        else:
            x = features
            normed = (
                self.norm("midlayer.input_layernorm", embedded, self.eps),
                self.norm("midlayer.hidden_norm", x, self.eps),
            )
            read = torch.cat(normed, 1)
        x = x + self._attention(read)
        return x + self.inner.layers[0].mlp(self.norm(f"{self.prefix}.post_attention_layernorm", x, self.eps))

    def _attention(self, read: Tensor) -> Tensor:
        count = len(read)
        turns = self.inner.rotary_emb(read[None], torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        found: Tensor = self.inner.layers[0].self_attn(read[None], position_embeddings=turns, attention_mask=mask)[0][0]
        return found

    def logits(self, row: Tensor) -> Tensor:
        if self.prefix == "layers.0":
            return super().logits(row)
        own = linear(self.norm("norm", row, self.eps), self.tensors["lm_head.weight"])
        full = own.new_full((self.model.config.vocab_size,), float("-inf"))
        full[torch.arange(len(own)) + self.tensors["d2t"]] = own
        return full


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_layers_of_the_models_own(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family, num_nextn_predict_layers=1)
    found = of_the_engine(load(path, nextn_of(load_model_config(path), flag="")))
    with torch.inference_mode():
        check(found, NextnReference(path, tmp_path / "other"))


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_a_hybrids_own(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family, mtp_num_hidden_layers=1)
    found = of_the_engine(load(path, nextn_of(load_model_config(path), flag="")))
    with torch.inference_mode():
        check(found, HybridReference(path, tmp_path / "other"))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda tensors: tensors.pop("mtp.fc.weight"),
            "--speculative-algorithm: the checkpoint has no tensor mtp.fc.weight, so no layer that drafts; take one that was published",
        ),
        (
            lambda tensors: tensors.update({"mtp.embed_tokens.weight": torch.ones(272, 64)}),
            r"the MTP layer has embeddings of its own \(mtp.embed_tokens.weight\), which is not supported; give NGRAM",
        ),
    ],
)
def test_a_layer_that_cannot_draft_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    """And only where it is asked for."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_next", mtp_num_hidden_layers=1)
    edit_tensors(tmp_path / "model.safetensors", edit)
    with pytest.raises(ConfigError, match=said):
        load(path, nextn_of(load_model_config(path), flag=""))
    load(path, None)


@pytest.mark.parametrize(("kind", "family"), [("EAGLE", "llama"), ("EAGLE3", "qwen3")])
def test_eagle(tmp_path: Path, kind: str, family: str) -> None:
    path, own = make_tiny_checkpoint(tmp_path / "model", family), make_tiny_eagle(tmp_path / "eagle", kind)
    found = of_the_engine(load(path, load_eagle(own, load_model_config(path), kind=kind)))
    with torch.inference_mode():
        check(found, EagleReference(path, own))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, the model's 64; give a drafter that is trained for it"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, the model's 64"),
        ({"vocab_size": 300}, "vocab_size is 300, the model's 272"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; drafters of one layer are supported"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures: .* not supported for a drafter; such as"),
        ({"eagle_config": {}}, "must name eagle_aux_hidden_state_layer_ids: the model has 4 layers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3]}},
            r"must be different layers of the model, 0 to 2, got \[3\]",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}},
            r"must be different layers of the model, 0 to 2, got \[1, 1\]",
        ),
        ({"draft_vocab_size": 90}, r"tensor lm_head.weight has shape \[100, 64\], config.json asks for \[90, 64\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3")
    own = make_tiny_eagle(tmp_path / "eagle", "EAGLE3", **fields)
    with pytest.raises(ConfigError, match=said):
        load(path, load_eagle(own, load_model_config(path), kind="EAGLE3"))


def test_a_model_of_one_layer_has_none_inside(tmp_path: Path) -> None:
    model = load_model_config(make_tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1))
    with pytest.raises(ConfigError, match="eagle_config: needs a model of at least two layers"):
        load_eagle(make_tiny_eagle(tmp_path / "eagle", "EAGLE3"), model, kind="EAGLE3")


# ---- features in the place of image tokens, as the model has

SEEN_IDS = torch.tensor([20, IMAGE, 22, 23])


@pytest.mark.parametrize("kind", [NEXTN, EAGLE, EAGLE3])
def test_features_of_an_image_are_as_an_embedding_of_its_token(tmp_path: Path, kind: str) -> None:
    path = with_mtp(tmp_path / "sees", "qwen3_5")
    config = load_model_config(path)
    if kind == NEXTN:
        drafter_config = nextn_of(config, flag="")
    else:
        drafter_config = load_eagle(make_tiny_eagle(tmp_path / "drafts", kind), config, kind=kind)
    model = load_model(path, config, dtype="float32", device="cpu", progress=False, drafter=drafter_config)
    drafter, positions = model.drafter, torch.arange(len(SEEN_IDS))
    assert drafter is not None
    generator = torch.Generator().manual_seed(1)
    before, features = (torch.randn((n, config.hidden_size), generator=generator) for n in (len(SEEN_IDS), 1))

    def drafted(images: StepImages) -> torch.Tensor:
        with torch.inference_mode():
            return drafter.forward(DraftEntries(SEEN_IDS, before, positions, images), Sequence(model)._attend)

    seen, blind = drafted((ImageRows(torch.tensor([1]), features),)), drafted(NO_IMAGES)
    with torch.inference_mode():
        model._embed._table[IMAGE] = features[0]  # type: ignore[attr-defined]
    assert torch.equal(seen, drafted(NO_IMAGES)) and not torch.allclose(seen, blind)
    assert torch.equal(seen[:1], blind[:1]), "what stands before it"
