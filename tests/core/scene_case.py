"""Many drawn scenes with their captions, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from train.data.scenes.captions import draw_caption
from train.data.scenes.layout import VARIANTS, Scene, draw_scene

MANY = 4096


@functools.cache
def drawn(variant: str = "full") -> tuple[Scene, np.ndarray]:
  """Many scenes, as numpy arrays, and a caption of each, [MANY, 32]."""

  def one(i):
    place, say = jax.random.split(jax.random.fold_in(jax.random.key(0), i))
    scene = draw_scene(place, VARIANTS[variant])
    return scene, draw_caption(say, scene, 32)

  return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jnp.arange(MANY)))


def rows_of(scene: Scene):
  """The scenes of a batch, one by one."""
  return map(Scene._make, zip(*scene, strict=True))
