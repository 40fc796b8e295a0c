import dataclasses
import functools
import json
import pickle
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.interop import files as weight_files
from sbjax.interop import layouts
from sbjax.interop import weights as convert
from sbjax.interop.config_files import config_from_dict, to_open_clip
from sbjax.interop.weights import check_architecture, load_weights, save_weights, state_dict
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig, open_clip_name
from sbjax.models.transformer import BlockOptions

MICRO = CLIPConfig(
  24,
  VisionConfig(image_size=16, patch_size=4, width=48, layers=3, heads=3, mlp_ratio=2.7),
  TextConfig(context_length=8, vocab_size=64, width=32, layers=2, heads=2, eot_id=63),
)
OPEN_CLIP_NAMES = {
  "S/16": "ViT-S-16",
  "B/32": "ViT-B-32",
  "B/16": "ViT-B-16",
  "L/14": "ViT-L-14",
  "H/14": "ViT-H-14",
  "bigG/14": "ViT-bigG-14",
}


OUR_NAMES = {"tiny": "tiny", "tiny-siglip": "tiny-siglip", "Ti/16": "ViT-Ti-16"}


def test_open_clip_s_name_is_that_of_a_size():
  named = {size: open_clip_name(size) for size in SIZES}
  assert named == {**OPEN_CLIP_NAMES, **OUR_NAMES}
  assert open_clip_name("checkpoints/mine") == "checkpoints/mine"


def random_params(**options):
  """Random parameters, none zero, one or symmetric."""
  image = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  init = CLIP(MICRO, BlockOptions(**options)).init
  variables = jax.eval_shape(init, jax.random.key(0), image, text)
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), variables["params"])


def torch_shapes(config):
  return layouts.torch_shapes(convert._shapes(config, {}), layouts.open_clip_layout(config, ""))


def struct_state(config):
  """A state dict of shapes."""
  return {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in torch_shapes(config).items()}


@pytest.mark.parametrize("layer_scale", [False, True])
def test_round_trip_is_exact(layer_scale):
  params = random_params(zero_init_layer_scale=layer_scale)
  state = state_dict(params, MICRO)
  assert ("visual.transformer.resblocks.2.ls_2.gamma" in state) == layer_scale
  jax.tree.map(np.testing.assert_array_equal, load_weights(state, MICRO), params)


def test_scanned_and_unrolled_parameters_give_the_same_state_dict():
  state = state_dict(random_params(), MICRO)
  unrolled = load_weights(state, MICRO, scan=False)
  assert jax.tree.structure(unrolled) == jax.tree.structure(random_params(scan=False))
  jax.tree.map(np.testing.assert_array_equal, state_dict(unrolled, MICRO), state)


def test_weights_of_another_architecture_name_the_size_that_fits():
  with pytest.raises(ValueError, match=r"patch_size=16, not 32\. Its .* that of SIZES\['B/16'\]"):
    check_architecture(SIZES["B/32"], SIZES["B/16"], "b16.safetensors")


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_a_config_beside_the_weights_must_be_of_the_same_architecture(tmp_path, monkeypatch, file):
  """Tensors tell neither the activation nor the number of heads."""
  state, path = state_dict(random_params(), MICRO), tmp_path / file
  monkeypatch.setattr(convert, "read_file", lambda path: state)
  (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": to_open_clip(MICRO)}))
  jax.tree.map(np.testing.assert_array_equal, load_weights(path, MICRO), random_params())
  vision = dataclasses.replace(MICRO.vision, heads=6)
  with pytest.raises(
    ValueError, match=r"is of another model than the config: vision heads=3, not 6"
  ):
    load_weights(path, dataclasses.replace(MICRO, vision=vision))
  text = dataclasses.replace(MICRO.text, activation="quick_gelu")
  with pytest.raises(ValueError, match=r"text activation='gelu', not 'quick_gelu'\.$"):
    load_weights(path, dataclasses.replace(MICRO, text=text))
  (tmp_path / "open_clip_config.json").rename(tmp_path / "config.json")
  (tmp_path / "config.json").write_text('{"model": {"size": "tiny"}}')  # A training run's.
  load_weights(path, dataclasses.replace(MICRO, text=text))


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"vision_cfg": {}}, r"The config has vision_cfg .* and lacks embed_dim and text_cfg\."),
    ({"vision_cfg": {}, "text_cfg": {}}, r"lacks embed_dim\."),
    ({"model_type": "clip", "projection_dim": None}, r"projection_dim=null: expected a number"),
    ({"model_type": "clip", "text_config": {"eos_token_id": None}}, r"eos_token_id=null: expected"),
    (
      {"model_type": "clip", "text_config": {"eos_token_id": [1, 2]}},
      r"eos_token_id=\[1, 2\]: exp",
    ),
    ({"model_type": "clip", "text_config": {"vocab_size": 9}}, r"eot_id=49407 must be below"),
  ],
)
def test_a_config_that_lacks_a_field_names_it(values, message):
  with pytest.raises(ValueError, match=message):
    config_from_dict(values)


def test_what_a_config_dict_of_transformers_lacks_is_the_default():
  """As CLIPConfig of transformers reads it; such old files have each tower's config twice."""
  text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
  config = {
    "model_type": "clip",
    "projection_dim": 24,
    "text_config": text | {"hidden_act": "gelu"},
  }
  assert config_from_dict(config).text.activation == "gelu"
  twice = config_from_dict(config | {"text_config_dict": text})
  assert (twice.text.activation, twice.text.width) == ("quick_gelu", 32)


def test_a_state_dict_error_lists_missing_unexpected_and_misshapen_tensors():
  state = state_dict(random_params(), MICRO)
  state["head.weight"] = state.pop("visual.proj")
  state["ln_final.bias"] = np.zeros(5, np.float32)
  with pytest.raises(ValueError) as error:
    load_weights(state, MICRO)
  assert "Missing: visual.proj." in str(error.value)
  assert "Unexpected: head.weight." in str(error.value)
  assert "ln_final.bias is (5,), not (32,)" in str(error.value)


@pytest.mark.parametrize("names", [[], ["ViT-B-16", "ViT-B-16-quickgelu"]])
def test_a_state_dict_of_another_size_names_the_models_of_that_size(monkeypatch, names):
  quick = {
    tower: dataclasses.replace(getattr(SIZES["B/16"], tower), activation="quick_gelu")
    for tower in ("vision", "text")
  }
  known = {name: SIZES["B/16"] for name in names}
  if names:
    known["ViT-B-16-quickgelu"] = dataclasses.replace(SIZES["B/16"], **quick)
  monkeypatch.setattr(convert, "open_clip_names", lambda: names)
  monkeypatch.setattr(convert, "read_config", lambda name: known[name])
  with pytest.raises(ValueError) as error:
    load_weights(struct_state(SIZES["B/16"]), SIZES["B/32"])
  models = ", ".join(["SIZES['B/16']", *(f"open_clip's {name}" for name in names)])
  assert str(error.value).endswith(
    f"Its shapes are those of {models}; tensors do not tell the activation (-quickgelu) or the"
    " number of heads."
  )


def test_parameters_that_open_clip_cannot_hold_are_refused():
  with pytest.raises(ValueError, match="qk_norm=True"):
    state_dict(random_params(qk_norm=True), MICRO)
  deeper = dataclasses.replace(MICRO, text=dataclasses.replace(MICRO.text, layers=3))
  with pytest.raises(ValueError, match=r"text/blocks/fc1/kernel is \(2, 32, 128\), not \(3,"):
    state_dict(random_params(), deeper)


@pytest.mark.parametrize("use", [load_weights, functools.partial(save_weights, random_params())])
def test_an_unknown_suffix_error_lists_the_known_ones(use, tmp_path):
  with pytest.raises(ValueError, match=r"clip.npz' must end in one of .safetensors, .pt"):
    use(str(tmp_path / "clip.npz"), MICRO)


def test_a_missing_folder_is_named_as_one(tmp_path):
  with pytest.raises(ValueError, match=r"There is no folder .*/exported; a file ends in one of"):
    load_weights(tmp_path / "exported", MICRO)
  with pytest.raises(ValueError, match=r"has no weights: expected open_clip_model\.safetensors, "):
    load_weights(tmp_path, MICRO)


@pytest.mark.parametrize(
  ("state", "message"),
  [
    ({"model": {"a": np.ones(2)}, "epoch": 3}, r"'model', 'epoch', which are no tensors"),
    ({"state_dict": [1]}, "'state_dict' is a list"),
    ([np.ones(2)], "holds a list"),
  ],
)
def test_what_is_no_state_dict_is_named(monkeypatch, tmp_path, state, message):
  torch = types.SimpleNamespace(load=lambda path, **_: state)
  monkeypatch.setattr(weight_files, "import_package", lambda name: torch)
  (tmp_path / "clip.pt").touch()
  with pytest.raises(ValueError, match=message):
    load_weights(tmp_path / "clip.pt", MICRO)


def renamed(change):
  return {change(name): tensor for name, tensor in state_dict(random_params(), MICRO).items()}


def inside(wrapper):
  """A name with what a wrapper of each block and of an inner module adds to it."""
  return lambda name: re.sub(r"(mlp|visual)\.", rf"{wrapper}.\1.", name)


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
PREFIXES = (
  *("_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.", "model.", "clip."),
  *("model.module.", "_forward_module.module.", "ema_model.", "ema.module."),
)


@pytest.mark.parametrize(
  "state",
  [
    *(renamed(lambda name, p=prefix: p + name) for prefix in PREFIXES),
    *(renamed(inside(wrapper)) for wrapper in WRAPPERS),
    {"state_dict": renamed(lambda name: f"model.{name}"), "optimizer_states": [{}], "epoch": 3},
    {"model": renamed(str), "optimizer": {"logit_scale": np.ones(())}, "step": 3},
    {"checkpoint": {"module": renamed(str)}},
    {"shadow": renamed(str), "decay": 0.999},
    renamed(lambda name: f"module.{name}") | {"n_averaged": np.int64(7)},
  ],
)
def test_what_wrappers_and_checkpoints_add_to_names_is_left_out(state):
  jax.tree.map(np.testing.assert_array_equal, load_weights(state, MICRO), random_params())


EMA = {name: tensor + 1 for name, tensor in renamed(str).items()}


@pytest.mark.parametrize(
  ("state", "places"),
  [
    (renamed(str) | {f"ema.{n}": x for n, x in EMA.items()}, "the top, ema"),
    ({"state_dict": renamed(str), "state_dict_ema": EMA}, "state_dict, state_dict_ema"),
    ({"model": renamed(str), "ema": {"module": EMA}}, "model, ema.module"),
    (
      renamed(lambda n: f"model.{n}") | {f"model_ema.module.{n}": x for n, x in EMA.items()},
      "model, model_ema",
    ),
    ({**renamed(str), "ema": EMA}, "the top, ema"),
    (
      {"state_dict": renamed(lambda n: f"teacher.{n}") | renamed(lambda n: f"student.{n}")},
      "state_dict.teacher, state_dict.student",
    ),
  ],
)
def test_of_several_models_none_is_taken_silently(state, places):
  with pytest.raises(ValueError, match=f"holds 2 models: at {places}. Pass the one that you want"):
    load_weights(state, MICRO)


def test_tensors_beside_a_model_and_names_that_collide_are_refused():
  state = renamed(lambda name: f"model.{name}")
  with pytest.raises(ValueError, match=r"Unexpected: ema.visual.proj, head.weight\."):
    load_weights(state | {"ema.visual.proj": EMA["visual.proj"], "head.weight": np.ones(3)}, MICRO)
  twice = renamed(str) | {"module.visual.proj": EMA["visual.proj"]}
  with pytest.raises(ValueError, match=r"visual\.proj twice: once as module\.visual"):
    load_weights(twice, MICRO)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_logit_scale_of_another_shape_of_one_number_is_a_scalar(shape):
  state = state_dict(random_params(), MICRO)
  params = load_weights(state | {"logit_scale": state["logit_scale"].reshape(shape)}, MICRO)
  assert params["logit_scale"].shape == ()
  assert params["logit_scale"] == state["logit_scale"]
  with pytest.raises(ValueError, match=r"logit_scale is \(2,\), not \(\)"):
    load_weights(state | {"logit_scale": np.ones(2, np.float32)}, MICRO)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("name", ["visual.transformer.resblocks.0.mlp.c_fc.weight", "logit_scale"])
def test_integers_and_8_bit_floats_are_no_weights(dtype, name):
  """Their scales may be anywhere, or nowhere."""
  state = state_dict(random_params(), MICRO)
  state[name] = state[name].astype(jnp.dtype(dtype))
  with pytest.raises(
    ValueError, match=rf"The state dict has {name} \({dtype}\): expected .*float32"
  ):
    load_weights(state, MICRO)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_weights(dtype):
  state = {n: x.astype(jnp.dtype(dtype)) for n, x in state_dict(random_params(), MICRO).items()}
  rounded = jax.tree.map(lambda x: np.float32(x.astype(jnp.dtype(dtype))), random_params())
  jax.tree.map(np.testing.assert_array_equal, load_weights(state, MICRO), rounded)


@pytest.fixture
def shards(tmp_path, monkeypatch):
  """A folder with an index and two shards, which a fake of safetensors reads."""
  state = state_dict(random_params(), MICRO)
  names, files = list(state), {}
  weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
  for file in {*weight_map.values()}:
    (tmp_path / file).touch()
    files[file] = {name: state[name] for name in names if weight_map[name] == file}
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
  fake = types.SimpleNamespace(load_file=lambda path: files[path.name])
  monkeypatch.setattr(weight_files, "import_package", lambda name: fake)
  return index, files


def test_shards_are_read_by_their_index(shards):
  index, _ = shards
  for source in (index, str(index.parent)):
    jax.tree.map(np.testing.assert_array_equal, load_weights(source, MICRO), random_params())


def test_an_incomplete_index_names_what_is_missing(shards):
  index, files = shards
  files["model-1.safetensors"].popitem()
  with pytest.raises(
    ValueError, match=r"model-1.safetensors lacks .*, which model.safetensors.ind"
  ):
    load_weights(index, MICRO)
  (index.parent / "model-0.safetensors").unlink()
  with pytest.raises(ValueError, match=r"names model-0\.safetensors, which is not beside it: c"):
    load_weights(index, MICRO)
  for text, message in {
    '{"weight_map": {"a": "../b.safetensors"}}': "names the shard '../b.safetensors'",
    '{"weight_map": {"a": 5}}': "names the shard 5: expected a file beside it",
    '{"weight_map": [1]}': "is no index of shards: expected a weight_map in JSON",
    "[]": "is no index of shards",
    "{": "is no index of shards",
  }.items():
    index.write_text(text)
    with pytest.raises(ValueError, match=message):
      load_weights(index, MICRO)
  index.unlink()
  with pytest.raises(ValueError, match=r"There is no file .*json: expected an index of shards"):
    load_weights(index, MICRO)


@pytest.mark.parametrize("error", [pickle.UnpicklingError("Weights only load failed."), EOFError()])
def test_a_damaged_file_of_weights_is_named(monkeypatch, tmp_path, error):
  def load(path, **_):
    raise error

  torch = types.SimpleNamespace(load=load, load_file=load)
  monkeypatch.setattr(weight_files, "import_package", lambda name: torch)
  for name in ("clip.pt", "clip.safetensors"):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name} cannot be read: {type(error).__name__}"):
      load_weights(tmp_path / name, MICRO)


def test_weights_are_written_to_the_home_folder(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  saved = []
  numpy = types.SimpleNamespace(save_file=lambda state, path, **_: saved.append(Path(path)))
  monkeypatch.setattr(weight_files, "import_package", lambda name: numpy)
  weight_files.write_file({}, "~/clip.safetensors")
  assert saved == [tmp_path / "clip.safetensors"]


def test_a_missing_torch_error_names_the_extra(monkeypatch, tmp_path):
  monkeypatch.setitem(__import__("sys").modules, "torch", None)
  with pytest.raises(ImportError, match=r"sbjax\[interop\]"):
    save_weights(random_params(), tmp_path / "clip.pt", MICRO)
