"""Texts that are hard for a tokenizer."""

# Hard cases for tokenizers: cleaning, contractions, digits, marks, scripts, joined emoji.
NASTY = [
  "",
  "   ",
  "It's DON'T we've I'LL they'd 'm rock'n'roll",
  "'\u017f it'\u017f",  # IGNORECASE takes the long s for an s.
  "ΣΑΣ ὈΔΥΣΣΕΎΣ Σ",
  "İstanbul Straße ẞ ŉ",
  "a &amp;amp; b &lt;3 &quot;quoted&#39; &nbsp; &hearts;",
  "<b>&amp;lt; two times&amp;amp;amp; three",  # ftfy leaves entities beside tags to html.unescape
  "12345 3½ 1,000.50 ٣ Ⅷ ²",
  "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
  "âœ” donâ€™t schÃ¶n",  # mojibake, which ftfy mends
  "“curly” ‘quotes’ … – — ﬁne",  # noqa: RUF001
  "tabs\tand\nlines\r\n\u00a0\u2003\u3000spaces",
  "\u001c \u0085 zero\u200bwidth\u200d",
  "dog\u0345 !\u0345!",  # dropped in open_clip: neither letter nor sign under IGNORECASE
  "e\u0301 n\u0303 Å ﷺ ｆｕｌｌ　ｗｉｄｔｈ",  # noqa: RUF001
  "日本語のキャプション 中文 한국어 ไทย हिन्दी العربية",
  "<end_of_text> in the text <start_of_text>",
  "___ --- *** #hash @user http://x.y/z?q=1&r=2",
  "x" * 400,
  "word " * 100,
]
