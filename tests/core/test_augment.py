"""Crops, flips and decoding of images, compared with Pillow and open_clip."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import ExifTags, Image, ImageFile

from train.data import augment
from train.data.augment import CentreCrop, RandomCrop, Squash
from train.data.decode import Limits

SIZE = 24


def encoded(pixels, kind, mode="RGB", **options):
  file = io.BytesIO()
  Image.fromarray(pixels).convert(mode).save(file, kind, **options)
  return file.getvalue()


def picture(width, height, coarse=4, seed=0):
  """Smooth noise with hard edges, like a photo: uint8 [height, width, 3]."""
  rng = np.random.default_rng(seed)
  small = rng.integers(0, 256, (-(-height // coarse), -(-width // coarse), 3), np.uint8)
  pixels = np.asarray(Image.fromarray(small).resize((width, height), Image.BICUBIC)).copy()
  for _ in range(5):
    x, y = rng.integers(width), rng.integers(height)
    pixels[y : y + height // 4, x : x + width // 4] = rng.integers(0, 256, 3)
  return pixels


def example(image):
  return {"where": "here", "image": image, "captions": ["x", "y"], "label": 0}


def drawn(image, size=SIZE, scale=(0.5, 1.0), flip=False, seed=0):
  return RandomCrop(size, scale, flip)(example(image), np.random.default_rng(seed))["image"]


def by_pillow(image, size=SIZE, scale=(0.5, 1.0), seed=0):
  """The crop of `drawn`, taken by Pillow from the whole decoded picture."""
  image = Image.open(io.BytesIO(image)).convert("RGB")
  box = augment._random_box(*image.size, scale, np.random.default_rng(seed))
  return np.asarray(image.crop(box).resize((size, size), Image.BICUBIC))


def test_crop_areas_and_aspect_ratios_are_in_range():
  rng = np.random.default_rng(0)
  boxes = np.array([augment._random_box(100, 90, (0.5, 0.8), rng) for _ in range(500)])
  left, top, right, bottom = boxes.T
  assert left.min() == top.min() == 0
  assert right.max() == 100
  assert bottom.max() == 90
  shares = (right - left) * (bottom - top) / 9000
  np.testing.assert_allclose(np.quantile(shares, [0, 0.5, 1]), [0.5, 0.65, 0.8], atol=0.02)
  ratios = (right - left) / (bottom - top)
  np.testing.assert_allclose([ratios.min(), ratios.max()], [3 / 4, 4 / 3], atol=0.04)


def test_a_crop_that_never_fits_falls_back_to_the_largest_centre_crop():
  rng = np.random.default_rng(0)
  assert augment._random_box(100, 10, (0.9, 1.0), rng) == (43, 0, 56, 10)
  assert augment._random_box(10, 100, (0.9, 1.0), rng) == (0, 43, 10, 56)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("flip", [False, True])
def test_images_are_flipped_only_with_flip(flip, kind):
  array = np.zeros((8, 8, 3), np.uint8)
  array[:, :4] = 255
  images = [drawn(encoded(array, kind), 8, (1.0, 1.0), flip, seed) for seed in range(30)]
  assert all(image[4, 0, 0] > 128 for image in images) != flip
  assert all((image[4, 0, 0] > 128) != (image[4, 7, 0] > 128) for image in images)


# Crops are enlarged, unscaled and reduced, but too little for decoding at reduced size.
@pytest.mark.parametrize("size", [24, 64, 150])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"mode": "L"}])
def test_jpeg_crops_equal_pillow_s_to_rounding(size, options):
  for seed in range(4):
    image = encoded(picture(109, 93, seed=seed), "jpeg", **options)
    away = np.abs(drawn(image, size, seed=seed).astype(int) - by_pillow(image, size, seed=seed))
    assert away.mean() <= 0.3
    assert np.quantile(away, 0.99) <= 1
    assert away.max() <= 20  # At hard edges Pillow clips overshoots between its passes.


def test_simplejpeg_decodes_as_pillow_does():
  for options in ({}, {"subsampling": 0}, {"progressive": True}, {"mode": "L"}, {"quality": 30}):
    image = encoded(picture(109, 93), "jpeg", **options)
    pillow = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(image, "RGB"), pillow)


@pytest.mark.parametrize("reduced", [2, 4, 8])
def test_a_jpeg_decoded_at_reduced_size_gives_nearly_the_same_crop(reduced, monkeypatch):
  made = []
  decode = simplejpeg.decode_jpeg
  monkeypatch.setattr(
    simplejpeg, "decode_jpeg", lambda *a, **k: made.append(decode(*a, **k)) or made[-1]
  )
  height, width = 16 * reduced * 3 + 5, 16 * reduced * 4 + 3  # The last block is partial.
  image = encoded(picture(width, height, coarse=12), "jpeg", quality=90)
  for seed in range(3):
    away = np.abs(drawn(image, 16, seed=seed).astype(int) - by_pillow(image, 16, seed=seed))
    assert made[-1].shape == (-(-height // reduced), -(-width // reduced), 3)
    assert away.mean() <= 1.5


def test_a_crop_is_decoded_at_twice_its_output_size_or_more():
  for width, height, size, reduced in [
    (895, 2000, 224, 1),  # 447 pixels a side would be less than 448.
    (896, 2000, 224, 2),
    (2000, 1791, 224, 2),
    (2000, 1792, 224, 4),
    (9000, 9000, 224, 8),
    (100, 100, 224, 1),
  ]:
    assert augment._reduction(width, height, size) == reduced


@pytest.mark.parametrize("kind, mode", [("png", "RGB"), ("png", "P"), ("jpeg", "CMYK")])
def test_png_and_cmyk_images_are_cropped_by_pillow(kind, mode):
  image = encoded(picture(109, 93), kind, mode)
  np.testing.assert_array_equal(drawn(image), by_pillow(image))


def test_a_crop_does_not_depend_on_pixels_outside_its_box():
  pixels = np.zeros((64, 64, 3), np.uint8)
  image = encoded(pixels, "jpeg")
  pixels[:, 32:] = 255
  half = encoded(pixels, "jpeg")
  ours = [augment._crop_jpeg(image, (64, 64), (0, 0, 32, 64), 20) for image in (image, half)]
  np.testing.assert_array_equal(*ours)


def test_jpeg_and_png_draw_the_same_random_numbers():
  pixels = picture(109, 93)
  rngs = [np.random.default_rng(5) for _ in range(2)]
  for kind, rng in zip(("png", "jpeg"), rngs, strict=True):
    RandomCrop(SIZE, (0.5, 1.0), True)(example(encoded(pixels, kind)), rng)
  assert rngs[0].random() == rngs[1].random()


def test_a_damaged_jpeg_is_decoded_by_pillow_or_refused():
  whole = encoded(picture(109, 93), "jpeg")
  extra = whole[:-2] + b"\0" * 8 + whole[-2:]  # Pillow ignores it; libjpeg-turbo warns.
  with pytest.raises(ValueError, match="extraneous bytes"):
    simplejpeg.decode_jpeg(extra, "RGB")
  np.testing.assert_array_equal(drawn(extra), by_pillow(whole))
  for broken in (whole[: len(whole) // 2], whole[:10], b"\xff\xd8", b"", b"no image"):
    with pytest.raises(ValueError, match="The image of here cannot be decoded"):
      drawn(broken)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize(
  ("size", "limits", "message"),
  [
    ((109, 93), {"image_pixels": 10_000}, "more pixels than data.max_image_pixels=10000"),
    ((900, 3), {}, "a ratio of sides above data.max_aspect_ratio=100"),
  ],
)
def test_an_image_beyond_a_limit_is_refused_before_it_is_decoded(
  kind, size, limits, message, monkeypatch
):
  image = encoded(picture(*size), kind)
  monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
  monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **kwargs: pytest.fail("decoded"))
  crops = [
    lambda x: RandomCrop(8, (0.5, 1), False, Limits(**limits))(x, np.random.default_rng(0)),
    CentreCrop(8, Limits(**limits)),
  ]
  for crop in crops:
    with pytest.raises(ValueError, match=f"The image of here cannot be decoded: {message}"):
      crop(example(image))


def test_a_thin_image_is_cropped_before_it_is_resized(monkeypatch):
  pixels = picture(96, 2)
  whole = Image.fromarray(pixels).resize((96 * 12, 24), Image.BICUBIC).crop((564, 0, 588, 24))
  np.testing.assert_array_equal(
    CentreCrop(SIZE)(example(encoded(pixels, "png")))["image"], np.asarray(whole)
  )
  sizes, resize = [], Image.Image.resize
  monkeypatch.setattr(Image.Image, "resize", lambda i, s, *a: sizes.append(s) or resize(i, s, *a))
  CentreCrop(SIZE, Limits(aspect_ratio=1e5))(example(encoded(pixels[:1].repeat(999, 1), "png")))
  assert sizes == [(8 * SIZE, SIZE)]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_opaque_images_of_any_mode_become_rgb_as_by_pillow(mode):
  image = encoded(picture(8, 8), "tiff", mode)
  np.testing.assert_array_equal(drawn(image, 4), by_pillow(image, 4))
  reference = Image.open(io.BytesIO(image)).convert("RGB")
  np.testing.assert_array_equal(CentreCrop(8)(example(image))["image"], np.asarray(reference))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_images_are_turned_upright_by_their_exif_orientation(orientation, kind):
  upright = picture(48, 32, coarse=16)
  stored = {
    1: upright,
    2: upright[:, ::-1],
    3: upright[::-1, ::-1],
    4: upright[::-1],
    5: upright.transpose(1, 0, 2),
    6: upright.transpose(1, 0, 2)[::-1],
    7: upright.transpose(1, 0, 2)[::-1, ::-1],
    8: upright.transpose(1, 0, 2)[:, ::-1],
  }[orientation]
  exif = Image.Exif()
  exif[ExifTags.Base.Orientation] = orientation
  best = {"lossless": True} if kind == "webp" else {"quality": 95}
  image = encoded(np.ascontiguousarray(stored), kind, exif=exif.tobytes(), **best)
  plain = encoded(upright, kind, **best)
  for crop in (drawn, lambda image: CentreCrop(SIZE)(example(image))["image"]):
    away = np.abs(crop(image).astype(int) - crop(plain))
    assert away.mean() <= (3 if kind == "jpeg" else 0)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_leaves_an_image_as_it_is():
  plain = encoded(picture(48, 32), "jpeg")
  for exif in (b"Exif\0\0", b"Exif\0\0MM\0\x2a\xff\xff\xff\xff", b"Exif\0\0no tiff"):
    image = encoded(picture(48, 32), "jpeg", exif=exif)
    assert exif in image
    np.testing.assert_array_equal(drawn(image), drawn(plain))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparent_pixels_become_white(mode):
  if mode in ("RGBA", "LA"):
    pixels = np.full((8, 8, len(mode)), 51, np.uint8)
    pixels[..., -1], pixels[:4, :, -1] = 255, 0
    image, options = Image.fromarray(pixels, mode), {}
  else:
    pixels = np.full((8, 8, 3), 51, np.uint8)
    pixels[:4] = 0  # The colour that a PNG calls transparent.
    image = Image.fromarray(pixels).convert(mode)
    options = {"transparency": image.getpixel((0, 0))}
  file = io.BytesIO()
  image.save(file, "png", **options)
  result = CentreCrop(8)(example(file.getvalue()))["image"]
  assert (result[:4] == 255).all()
  assert (result[4:] == 51).all()


def test_half_transparent_pixels_are_half_white():
  pixels = np.full((8, 8, 4), (200, 100, 0, 128), np.uint8)
  result = CentreCrop(8)(example(encoded(pixels, "png", "RGBA")))["image"]
  np.testing.assert_allclose(result[0, 0], [227, 177, 127], atol=1)


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_16_bit_grey_is_divided_by_256(kind):
  pixels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024 + 255
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind)
  result = CentreCrop(8)(example(file.getvalue()))["image"]
  np.testing.assert_array_equal(result, np.repeat((pixels >> 8)[..., None], 3, axis=2))


def test_formats_that_start_programs_are_not_opened():
  eps = io.BytesIO()
  Image.new("RGB", (8, 8)).save(eps, "eps")
  with pytest.raises(ValueError, match="The image of here cannot be decoded: cannot identify"):
    drawn(eps.getvalue())


def test_a_squashed_image_is_the_whole_image():
  pixels = np.zeros((12, 96, 3), np.uint8)
  pixels[:, :48] = 255  # A centre crop of a wide picture loses its sides.
  squashed = Squash(SIZE)(example(encoded(pixels, "png")))
  assert squashed["image"].shape == (SIZE, SIZE, 3) and squashed["label"] == 0
  assert squashed["image"][:, : SIZE // 2 - 1].min() > 250
  assert squashed["image"][:, SIZE // 2 + 1 :].max() < 5
  with pytest.raises(ValueError, match="The image of here cannot be decoded"):
    Squash(SIZE)(example(b"no picture"))
  with pytest.raises(ValueError, match="sides"):
    Squash(SIZE, Limits(aspect_ratio=5))(example(encoded(pixels, "png")))
