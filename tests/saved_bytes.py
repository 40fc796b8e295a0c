"""The bytes that a block saves for the backward pass, by recipe and remat policy.

JAX traces a ViT-L/14 for an NVIDIA GPU that is absent, with cuDNN's attention, in bfloat16. Nothing
is compiled. "switchback+grouped" is the recipe with keep="grouped" (sbjax/linear/grouped.py).
"""

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from benchmarks.absent_gpu import Device
from sbjax.attention import length_for
from sbjax.models import CLIP, SIZES, BlockOptions

SIZE = "L/14"
LAYERS, IMAGES = 5, 3  # No weight [LAYERS, ...] has a multiple of the tokens of so many images.


def measure(case: str, remat: str) -> dict:
  """Bytes a token and unit of width of the vision tower's blocks; the arrays by dtype and size."""
  size = SIZES[SIZE]
  vision = dataclasses.replace(size.vision, layers=LAYERS)
  recipe, _, keep = case.partition("+")
  keep = keep or "original"
  how = {"backend": "xla", "attention_backend": "cudnn", "remat": remat, "keep": keep}
  options = BlockOptions(recipe=recipe, **how)
  model = CLIP(dataclasses.replace(size, vision=vision), options)
  pixels, tokens = (IMAGES, vision.image_size, vision.image_size, 3), (1, size.text.context_length)
  image, text = jax.ShapeDtypeStruct(pixels, jnp.float32), jax.ShapeDtypeStruct(tokens, jnp.int32)

  def backward(image, text):
    params = model.init(jax.random.key(0), image, text)["params"]
    encode = functools.partial(model.apply, method=model.encode_image)
    return jax.vjp(encode, {"params": params}, image)[1]  # A pytree of the saved arrays.

  device = Device("NVIDIA H200", 132, "gpu", "9.0")
  mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
  # JAX asks the cuDNN that is not here for its version.
  version = mock.patch(
    "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
  )
  with use_abstract_mesh(mesh), version:
    saved = jax.tree.leaves(jax.eval_shape(backward, image, text))
    head_dim = vision.width // vision.heads
    length = length_for(
      (vision.image_size // vision.patch_size) ** 2 + 1, jnp.bfloat16, head_dim, "cudnn"
    )
  arrays = collections.Counter()
  for x in saved:
    if x.ndim > 1 and x.shape[0] == LAYERS and x.size % (LAYERS * IMAGES * length) == 0:
      arrays[x.dtype.name, x.size // (LAYERS * IMAGES * length)] += 1
  total = sum(n * jnp.dtype(dtype).itemsize * each for (dtype, each), n in arrays.items())
  return {
    "size": SIZE,
    "recipe": case,
    "remat": remat,
    "bytes": round(total / vision.width, 3),
    "arrays": {
      f"{dtype}[{each}]": n for (dtype, each), n in sorted(arrays.items(), key=lambda a: -a[0][1])
    },
  }
