"""Messages that say what to install if an optional dependency is missing."""

DIFFUSION = 'evaluate --inputs needs diffusers: pip install "quanterr[diffusion]"'
EXTRA = 'evaluate needs transformers and greenlet: pip install "quanterr[evaluate]"'
