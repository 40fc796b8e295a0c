"""A value that cannot be meant is refused before data are touched, with what would be right."""

import json
import re

import loop_case
import pytest

from train import memory, run, task
from train.config import Config, DataConfig
from train.data import collate
from train.data.builders import prepare
from train.data.tokenizer import make_tokenizer

REFUSED = [
  ("model.size", "Q/9", "model.size='Q/9': 'Q/9' is no model: known are tiny"),
  ("model.image_size", -32, "must be 0 (the size's own) or more"),
  ("model.image_size", 33, "image_size=33 must be a multiple of patch_size=8"),
  ("model.patch_size", -8, "must be 0 (the size's own) or more"),
  ("model.context_length", -1, "must be 0 (the size's own) or at least 3"),
  ("model.context_length", 2, "must be 0 (the size's own) or at least 3"),
  ("model.recipe", "switchbak", "Unknown recipe 'switchbak'; known: full"),
  ("model.recipe", "switchback until 0.5, ful", "Unknown recipe 'ful'; known: full"),
  ("model.recipe", "full until 2, */fc3=full, *=full", "The rule for '*/fc3' fits no linear"),
  ("model.recipe", "full until .5, full until .5, full", "leaves no step to 'full', after step 2"),
  ("model.recipe", "full until .5, full until 1, full", "after step 2 and up to step 1 of steps=4"),
  ("model.recipe", "full until 0.1, switchback", "leaves no step to 'full', after step 0 and up"),
  ("model.recipe", "full until 4, switchback", "to 'switchback', after step 4 and up to step 4 of"),
  ("model.recipe", "full until 1.5, switchback", "'1.5' be a share of the steps between 0 and 1"),
  ("model.recipe", "full until 0, switchback", "leaves no step to 'full', after step 0 and up to"),
  ("model.recipe", "full until soon, switchback", "'soon' be a share of the steps between 0 and 1"),
  ("model.recipe", "full until 0.5 switchback", "must be followed by a comma and the next recipe"),
  ("model.recipe", "full until 1, full until 2", "must end with a recipe without 'until'"),
  ("model.recipe", "until 1, full", "must have a recipe before each 'until'"),
  ("model.stages", "16 until 0.5, 32px", "'16' must be a size in pixels, such as '98px', or with"),
  ("model.stages", "16px, 0.5 until 0.5, 32px", "'16px, 0.5' must be a size in pixels, such as"),
  ("model.stages", "16px drop 1 until 0.5, 32px", "at least 0 and less than 1: '98px drop 0.5'"),
  ("model.stages", "0px until 0.5, 32px", "'0px' must be a size in pixels"),
  ("model.stages", "16px until 0.5; 32px", "must be followed by a comma and the next stage"),
  ("model.stages", "16px until 0.5", "must end with a stage without 'until', such as '98px drop"),
  ("model.stages", "until 0.5, 32px", "must have a stage before each 'until'"),
  ("model.stages", "16px until .5, 24px until .4, 32px", "leaves no step to '24px', after step 2"),
  ("model.stages", "16px until 0.1, 32px", "leaves no step to '16px', after step 0 and up to step"),
  ("model.stages", "16px until 9, 32px", "leaves no step to '32px', after step 9 and up to step 4"),
  ("model.stages", "20px until 0.5, 32px", "=20 must be a multiple of patch_size=8 and at most im"),
  ("model.stages", "40px until 0.5, 32px", "and at most image_size=32, such as 32."),
  ("model.stages", "16px until 0.5, 24px", "the last stage's 24px must be the model's image_size"),
  ("model.stages", "24px", "image_size=32, whose position embedding is saved: end with '32px'"),
  ("model.backend", "cuda", "cuda"),
  ("model.dtype", "float64", "must be 'bfloat16', 'float16' or 'float32'"),
  ("model.scan", "False", "must be true or false"),
  ("model.patch_dropout", 1.0, "must be at least 0 and less than 1"),
  ("model.patch_dropout", -0.1, "must be at least 0 and less than 1"),
  ("model.unroll", -2, "must be -1 (all layers on a GPU), 0 (all layers) or more"),
  ("model.remat", "all", "remat='all' must be 'none'"),
  ("data.image_key", "", "must be the name of a feature"),
  ("data.templates", ("a dog",), "must be at least one text, each with {} for the name of a class"),
  ("data.templates", (), "must be at least one text"),
  ("data.templates", "a {}", "must be texts, such as"),
  ("data.tokenizer_vocab_size", 258, "must be at least 260"),
  ("data.crop_scale", (0.5,), "must be two numbers, 0 < low <= high <= 1"),
  ("data.crop_scale", (0.9, 0.5), "must be two numbers, 0 < low <= high <= 1"),
  ("data.crop_scale", (0.1, float("nan")), "must be two numbers, 0 < low <= high <= 1"),
  ("data.workers", -1, "must be 0 (threads of this process) or more"),
  ("data.prefetch", -1, "must be 0 (no thread) or more"),
  ("optimizer.name", "adam", "optimizer.name='adam' is none of stable_adamw, adamw"),
  *((f"optimizer.{field}", bad, "must be 0 or more, and finite")
    for field in ("learning_rate", "weight_decay", "clip_norm")
    for bad in (-1.0, float("inf"), float("nan"))),
  *(("optimizer.eps", bad, "must be more than 0, and finite") for bad in (-1.0, 0, float("nan"))),
  *((f"optimizer.{field}", bad, "must be at least 0 and less than 1")
    for field in ("b1", "b2") for bad in (1.0, -0.5, float("nan"))),
  *(("optimizer.b2_power", bad, "must be from 0 (b2 stays the same) to 1")
    for bad in (-0.5, 1.5, float("nan"))),
  *(("optimizer.ema", bad, "must be 0 (no average) or more, and less than 1")
    for bad in (1.0, -0.5, float("nan"))),
  ("optimizer.warmup_steps", -1, "optimizer.warmup_steps=-1 must be in [0, steps=4)"),
  ("optimizer.schedule", "linear", "optimizer.schedule='linear' is none of cosine, constant"),
  ("optimizer.cooldown_steps", -1, "must be 0 (no cool-down) or more"),
  ("optimizer.cooldown_steps", 2, "must be 0 with optimizer.schedule='cosine'"),
  ("optimizer.decay_with", "rms", "decay_with='rms' is not a rule for weight decay"),
  ("mesh.data", 0, "must be -1 (what the other leaves) or at least 1"),
  ("mesh.fsdp", -2, "must be -1 (what the other leaves) or at least 1"),
  ("mesh.fsdp", 3, "does not make"),
  ("mesh.gradient_dtype", "int8", "must be 'bfloat16' or 'float32'"),
  ("mesh.gradient_exchange", "e5m2", "must be 'float32', 'bfloat16', 'e4m3' or 'int8'"),
  ("init_model", "ViT-B-32", "init_model='ViT-B-32' is the model of init, which is not set"),
  ("freeze", ("image/.*",), "freeze=('image/.*',) would freeze random parameters: set init"),
  ("loss", "hinge", "loss='hinge' is none of softmax, siglip"),
  ("batch_size", 0, "must be at least 1"),
  ("batch_size", 12, "batch_size=12 must be a multiple of 8 devices"),
  ("accumulate", 3, "batch_size=8 must be a multiple of 8 devices x accumulate=3"),
  ("steps", 1.5, "must be a whole number"),
  ("steps", True, "must be a whole number"),
  ("steps", "9", "must be a whole number"),
  ("seed", -1, "must be from 0 to 4294967295"),
  ("seed", 2**32, "must be from 0 to 4294967295"),
  ("watch", ("image/block_3/fc2",), "matches no parameter. A pattern is for the whole path"),
  ("watch", ("image/block_3/fc2",), "Paths near it: image/block_2/fc2/bias, image/block_1/fc2/"),
  ("watch", ("text/(",), "watch='text/(' is no regular expression"),
  ("log_every", 0, "must be at least 1"),
  ("eval_every", -1, "must be 0 (only at the end) or more"),
  ("eval_batch_size", 0, "must be at least 1"),
  ("checkpoint_every", -1, "must be 0 (only at the end) or more"),
  ("checkpoint_keep", 0, "must be at least 1"),
  ("checkpoint_keep_every", -1, "must be 0 (none) or more"),
  ("checkpoint_keep_every", 3, "checkpoint_keep_every=3 must be a multiple of checkpoint_every=2"),
  ("step_timeout_seconds", -1, "must be 0 (no limit) or more"),
  ("profile_steps", "9:1", "must be 'first:last'"),
]  # fmt: skip


@pytest.mark.parametrize(
  ("field", "value", "message"), REFUSED, ids=[f"{name}={value!r}" for name, value, _ in REFUSED]
)
def test_a_value_that_cannot_be_meant_is_refused_before_data_are_touched(
  tmp_path, monkeypatch, field, value, message
):
  monkeypatch.setattr(run, "open_source", lambda config: pytest.fail("The data were touched."))
  config = loop_case.config(tmp_path, **{field: value})
  with pytest.raises(ValueError, match=re.escape(message)) as raised:
    run.make_run(config, tmp_path)
  named = field.rpartition(".")[2]
  assert named in str(raised.value) and str(value).strip("(),") in str(raised.value)


def test_recipes_and_images_in_turn_make_a_stage_between_each_two_ends(tmp_path):
  model = {
    "model.recipe": "switchback until 3, full",
    "model.stages": "16px drop 0.5 until 0.2, 24px until 3, 24px drop 0 until 0.8, 32px",
    "model.patch_dropout": 0.25,
  }
  made = loop_case.config(tmp_path, steps=10, **model)
  assert made.stages() == (
    (2, "switchback", 16, 0.5),
    (3, "switchback", 24, 0.25),
    (8, "full", 24, 0.0),
    (10, "full", 32, 0.25),
  )
  assert [made.stage(step) for step in range(1, 12)] == [0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]
  plain = loop_case.config(tmp_path, steps=10, **{"model.patch_dropout": 0.25})
  assert plain.stages() == ((10, "full", 0, 0.25),)


def test_checkpoints_that_are_to_stay_need_steps_and_scores(tmp_path):
  config = loop_case.config(tmp_path, checkpoint_every=0, checkpoint_keep_every=2)
  with pytest.raises(ValueError, match="a multiple of checkpoint_every=0, which must be more"):
    config.check()
  config = loop_case.config(tmp_path, checkpoint_best="top1", **{"data.eval_split": ""})
  with pytest.raises(ValueError, match="checkpoint_best='top1' needs an evaluation: set"):
    config.check()


def test_a_field_takes_values_of_its_type(tmp_path):
  config = loop_case.config(
    tmp_path, **{"data.templates": ["a {}"], "data.crop_scale": [1, 1], "optimizer.b1": 0}
  )
  config.check()


def test_a_config_survives_json(tmp_path):
  config = loop_case.config(tmp_path)
  values = json.loads(json.dumps(config.to_dict()))
  assert Config.from_dict(values) == config
  del values["data"]["flip"], values["mesh"]
  assert Config.from_dict(values) == config


def test_a_tilde_in_a_data_path_is_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "tokens.json").write_text("{}")
  with pytest.raises(ValueError, match=f"{tmp_path}/tokens.json is not a tokenizer.json"):
    make_tokenizer("~/tokens.json", None, 0)
  (tmp_path / "tars").mkdir()
  data_config = DataConfig(name="mine", data_dir="~/data", root="~/tars", train_shards="a.tar")
  with pytest.raises(ValueError, match=f"{tmp_path}/tars/a.tar"):
    prepare(data_config)
  builder = prepare(DataConfig(name="shapes/tiny", data_dir="~/data"))
  assert str(builder.data_dir).startswith(str(tmp_path / "data"))


def test_other_braces_in_a_template_stay_as_they_are(tmp_path):
  config = loop_case.config(tmp_path, **{"data.templates": ("a {} {x}",)})
  assert collate.prompts(config.data.templates, "dog") == ["a dog {x}"]


def test_a_run_reads_its_size_once(tmp_path, monkeypatch):
  names = []
  read = task.read_config
  monkeypatch.setattr(task, "read_config", lambda name: names.append(name) or read(name))
  made = run.make_run(loop_case.config(tmp_path, watch=(".*/kernel",)), tmp_path)
  memory._with_remat(made, "block")
  assert names == [made.config.model.size]
