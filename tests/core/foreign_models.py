"""The structure of models elsewhere, for `quantize_model`: what each adds to a stack of Dense.

benchmarks/results/models.jsonl is of the models themselves.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, struct


class Conv1D(nn.Module):
  """GPT2's linear layer in transformers: its own, with the kernel transposed."""

  features: int

  @nn.compact
  def __call__(self, x):
    shape = self.features, x.shape[-1]
    kernel = self.param("kernel", nn.initializers.normal(0.2), shape)
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ()))) + bias


class GPT(nn.Module):
  """Conv1D, attention by einsum, and the token embedding again as the last layer."""

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(24, 16, name="wte")
    x = embed(tokens)
    q, k, v = jnp.split(Conv1D(48, name="c_attn")(nn.LayerNorm()(x)), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    x = x + Conv1D(16, name="c_proj")(jnp.einsum("bqk,bkd->bqd", weights, v))
    return embed.attend(x)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, deterministic):
    x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
    y = nn.gelu(nn.Dense(32, name="fc1")(nn.LayerNorm()(x)))
    y = nn.Dropout(0.5)(y, deterministic)
    return x + nn.Dense(16, name="fc2")(y), None


class ViT(nn.Module):
  """big_vision's: patches, a scan of remat blocks, attention pooling by a learned probe."""

  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Conv(16, (4, 4), (4, 4), padding="VALID", dtype=self.dtype, name="embedding")(image)
    x = x.reshape(x.shape[0], -1, 16).astype(jnp.float32)
    blocks = nn.scan(
      nn.remat(Block, prevent_cse=False, static_argnums=(2,)),
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=nn.broadcast,
      length=2,
    )
    x, _ = blocks(name="blocks")(x, not train)
    probe = jnp.tile(self.param("probe", nn.initializers.normal(1.0), (1, 1, 16)), [len(x), 1, 1])
    x = nn.MultiHeadDotProductAttention(2, name="pool")(probe, x)
    return nn.Dense(8, name="head")(x[:, 0])


class Classifier(nn.Module):
  """Google's ViT: a class token, learned positions, a head on the token."""

  @nn.compact
  def __call__(self, image):
    x = nn.Conv(16, (4, 4), (4, 4), padding="VALID", name="embedding")(image)
    x = x.reshape(x.shape[0], -1, 16)
    token = jnp.tile(self.param("cls", nn.initializers.zeros, (1, 1, 16)), [len(x), 1, 1])
    x = jnp.concatenate([token, x], axis=1)
    x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
    x, _ = Block(name="encoderblock_0")(x, True)
    return nn.Dense(8, name="head")(nn.LayerNorm()(x)[:, 0])


class Decoder(nn.Module):
  """Blocks of lm1b, and logits by the embedding of its caller; parameters are in boxes."""

  embed: nn.Embed

  @nn.compact
  def __call__(self, tokens):
    def boxed(*axes):
      return nn.with_logical_partitioning(nn.initializers.normal(0.2), axes)

    mask = nn.combine_masks(
      nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens)
    )
    x = self.embed(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])
    y = nn.LayerNorm(scale_init=boxed("embed"))(x)
    x = x + nn.MultiHeadDotProductAttention(
      2, use_bias=False, kernel_init=boxed("embed", "kv"), name="attention"
    )(y, mask=mask)
    y = nn.relu(nn.Dense(32, kernel_init=boxed("embed", "mlp"), name="fc1")(x))
    x = x + nn.Dense(16, kernel_init=boxed("mlp", "embed"), name="fc2")(y)
    return self.embed.attend(x.astype(jnp.float32)) / 4


class LanguageModel(nn.Module):
  """Flax's example lm1b: an embedding that is shared with a submodule."""

  @nn.compact
  def __call__(self, tokens):
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
    return Decoder(nn.Embed(24, 16, embedding_init=init, name="embed"), name="decoder")(tokens)


class Layer(nn.Module):
  """An encoder layer of FlaxCLIP: made in `setup`, q, k and v of their own, a bias as the mask."""

  causal: bool

  def setup(self):
    self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Dense(16) for _ in range(4))
    self.fc1, self.fc2 = nn.Dense(32), nn.Dense(16)
    self.norms = [nn.LayerNorm(), nn.LayerNorm()]

  def __call__(self, x, mask=None):
    y = self.norms[0](x)
    q, k, v = (f(y).reshape(*y.shape[:2], 2, 8) for f in (self.q_proj, self.k_proj, self.v_proj))
    if self.causal:
      mask = nn.combine_masks(mask[:, None, None], nn.make_causal_mask(mask))
    bias = None if mask is None else jnp.where(mask > 0, 0.0, -1e9)
    weights = nn.dot_product_attention_weights(q, k, bias=bias)
    y = jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(y.shape)
    x = x + self.out_proj(y)
    y = self.fc1(self.norms[1](x))
    return x + self.fc2(y * jax.nn.sigmoid(1.702 * y))


@struct.dataclass
class Output:
  logits: jax.Array
  image: jax.Array


class FlaxCLIP(nn.Module):
  """transformers' CLIP: two towers of modules in lists, and an output that is a dataclass."""

  def setup(self):
    self.patches = nn.Conv(16, (4, 4), (4, 4), padding="VALID", use_bias=False)
    self.token_embedding, self.position_embedding = nn.Embed(24, 16), nn.Embed(5, 16)
    self.vision, self.text = [Layer(causal=False)], [Layer(causal=True)]
    self.visual_projection, self.text_projection = (nn.Dense(8, use_bias=False) for _ in range(2))
    self.logit_scale = self.param("logit_scale", nn.initializers.ones, ())

  def __call__(self, tokens, image):
    x = self.patches(image).reshape(image.shape[0], -1, 16)
    for layer in self.vision:
      x = layer(x)
    y = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1])[None])
    for layer in self.text:
      y = layer(y, jnp.ones_like(tokens))
    y = y[jnp.arange(len(y)), tokens.argmax(-1)]
    image, text = self.visual_projection(x[:, 0]), self.text_projection(y)
    image, text = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (image, text))
    return Output(jnp.matmul(text, image.T) * jnp.exp(self.logit_scale), image)


class Llama(nn.Module):
  """A block of LLaMA: RMS norms, rotated queries and keys, SwiGLU, and no bias."""

  @nn.compact
  def __call__(self, x):
    n = nn.RMSNorm(epsilon=1e-5, name="attention_norm")(x)
    x = x + self.linear(16, "o_proj")(
      attend_rotated(*(self.linear(16, f"{h}_proj")(n) for h in "qkv"))
    )
    n = nn.RMSNorm(epsilon=1e-5, name="mlp_norm")(x)
    gate, up = self.linear(48, "gate_proj")(n), self.linear(48, "up_proj")(n)
    return x + self.linear(16, "down_proj")(nn.silu(gate) * up)

  def linear(self, features, name):
    return nn.Dense(features, use_bias=False, name=name)


class NnxLlama(nnx.Module):
  """The same, with the same names."""

  def __init__(self, rngs):
    def linear(*sizes):
      return nnx.Linear(*sizes, use_bias=False, rngs=rngs)

    self.attention_norm, self.mlp_norm = (
      nnx.RMSNorm(16, epsilon=1e-5, rngs=rngs) for _ in range(2)
    )
    self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(16, 16) for _ in range(4))
    self.gate_proj, self.up_proj, self.down_proj = linear(16, 48), linear(16, 48), linear(48, 16)

  def __call__(self, x):
    n = self.attention_norm(x)
    x = x + self.o_proj(attend_rotated(self.q_proj(n), self.k_proj(n), self.v_proj(n)))
    n = self.mlp_norm(x)
    return x + self.down_proj(nnx.silu(self.gate_proj(n)) * self.up_proj(n))


def attend_rotated(q, k, v):
  """Causal attention of q, k and v [B, L, 16] by two heads, with rotary positions."""
  q, k, v = (a.reshape(*a.shape[:-1], 2, 8) for a in (q, k, v))
  frequencies = 100.0 ** -jnp.linspace(0, 1, 4)
  angles = (jnp.arange(q.shape[1])[:, None] * frequencies[None])[None, :, None]
  q, k = (_rotated(a, jnp.sin(angles), jnp.cos(angles)) for a in (q, k))
  return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*q.shape[:2], 16)


class Experts(nn.Module):
  """A layer of experts, whose einsum hands the weights to XLA as the left operand."""

  @nn.compact
  def __call__(self, x):
    w = self.param("wi", nn.initializers.normal(0.2), (2, 16, 8))
    return jnp.einsum("ebd,edf->bef", x, w)


class ConvNeXt(nnx.Module):
  """Patches, a depthwise convolution, a statistic that changes, dropout with its own keys."""

  def __init__(self, rngs):
    self.stem = nnx.Conv(3, 16, (4, 4), (4, 4), rngs=rngs)
    self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)])
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, image):
    x = self.norm(self.depthwise(self.stem(image)))
    x = self.dropout(nnx.gelu(self.layers[0](x)))
    return self.layers[1](x).mean((1, 2))


class Cache(nnx.Module):
  """Keys and values of a layer of Qwen3, and how many."""

  def __init__(self):
    self.k, self.v = (nnx.Cache(jnp.zeros((2, 8, 1, 8))) for _ in range(2))
    self.length = nnx.Variable(jnp.zeros((), jnp.int32))


class Qwen3(nnx.Module):
  """Bonsai's: nnx.Einsum, two heads that share a key, a gated MLP, a cache as an argument."""

  def __init__(self, rngs):
    self.embedder = nnx.Embed(24, 16, rngs=rngs)
    self.q_proj = nnx.Einsum("BTD,DNH->BTNH", (16, 2, 8), rngs=rngs)
    self.k_proj, self.v_proj = (
      nnx.Einsum("BSD,DKH->BSKH", (16, 1, 8), rngs=rngs) for _ in range(2)
    )
    self.o_proj = nnx.Einsum("BTNH,NHD->BTD", (2, 8, 16), rngs=rngs)
    self.q_norm, self.k_norm = (nnx.RMSNorm(8, rngs=rngs) for _ in range(2))
    self.gate_proj, self.up_proj = (nnx.Linear(16, 32, use_bias=False, rngs=rngs) for _ in range(2))
    self.down_proj = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
    self.lm_head = nnx.Einsum("BTD,DV->BTV", (16, 24), rngs=rngs)

  @property
  def head_dim(self):
    return self.o_proj.kernel.shape[1]

  def __call__(self, tokens, cache):
    x = self.embedder(tokens)
    x = x + self.attend(x, cache)
    return self.lm_head(x + self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x)))

  def attend(self, x, cache):
    start, length = cache.length[...], x.shape[1]
    q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
    positions = start + jnp.arange(length)
    frequencies = 100.0 ** -jnp.linspace(0, 1, self.head_dim // 2)
    angles = jnp.einsum("T,k->Tk", positions, frequencies, precision="highest")[:, None]
    q, k = (_rotated(a, jnp.sin(angles), jnp.cos(angles)) for a in (q, k))
    for saved, new in ((cache.k, k), (cache.v, self.v_proj(x))):
      saved.set_value(jax.lax.dynamic_update_slice(saved[...], new, (0, start, 0, 0)))
    cache.length.set_value(start + length)
    grouped = q.reshape(*q.shape[:2], 1, 2, self.head_dim)
    logits = jnp.einsum("BTKGH,BSKH->BTSKG", grouped, cache.k[...])
    seen = jnp.arange(cache.k.shape[1]) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen[..., None, None], logits, -1e9), axis=2)
    y = jnp.einsum("BTSKG,BSKH->BTKGH", weights, cache.v[...])
    return self.o_proj(y.reshape(q.shape))


def _rotated(x, sin, cos):
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Encoder(nnx.Module):
  """A block of jimm's: nnx.MultiHeadAttention, and an MLP in an nnx.Sequential with dropout."""

  def __init__(self, mask, rngs):
    self.mask = None if mask is None else nnx.data(mask)
    self.norm = nnx.LayerNorm(16, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(2, 16, decode=False, deterministic=False, rngs=rngs)
    self.mlp = nnx.Sequential(
      nnx.Linear(16, 32, rngs=rngs), nnx.gelu, nnx.Dropout(0.0, rngs=rngs),
      nnx.Linear(32, 16, rngs=rngs),
    )  # fmt: skip

  def __call__(self, x):
    x = x + self.attn(self.norm(x), mask=self.mask)
    return x + self.mlp(x)


class JimmCLIP(nnx.Module):
  """Two towers, each with a method of its own, and a projection's kernel outside of its layer."""

  def __init__(self, rngs):
    self.patches = nnx.Conv(3, 16, (4, 4), (4, 4), padding="VALID", use_bias=False, rngs=rngs)
    self.cls_token = nnx.Param(jax.random.normal(rngs.params(), (1, 1, 16)))
    self.vision_model = nnx.Sequential(Encoder(None, rngs))
    self.visual_projection = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
    self.token_embedding = nnx.Embed(24, 16, rngs=rngs)
    self.positional_embedding = nnx.Param(jax.random.normal(rngs.params(), (5, 16)))
    self.text_model = nnx.Sequential(Encoder(jnp.tril(jnp.ones((5, 5))), rngs))
    self.text_projection = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
    self.logit_scale = nnx.Param(jnp.ones(()))

  def encode_image(self, image):
    x = self.patches(image).reshape(len(image), -1, 16)
    token = jnp.tile(self.cls_token[...], [len(x), 1, 1])
    return self.visual_projection(self.vision_model(jnp.concatenate([token, x], axis=1))[:, 0])

  def encode_text(self, tokens):
    x = self.token_embedding(tokens) + self.positional_embedding[...][: tokens.shape[1]]
    x = self.text_model(x)[jnp.arange(len(tokens)), tokens.argmax(-1)]
    return x @ self.text_projection.kernel[...]

  def __call__(self, image, tokens):
    image, text = self.encode_image(image), self.encode_text(tokens)
    image, text = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (image, text))
    return jnp.exp(self.logit_scale[...]) * image @ text.T
