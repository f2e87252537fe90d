"""What converters change in a model's tensors, as data: names, joined tensors, orders of rows and columns, numbers.

    gguf_names     llama.cpp's names of tensors, by architecture
    llama_cpp      what llama.cpp's converter does to their values, by architecture
    mlx            what mlx-lm does to the values, by model_type
    hugging_face   how transformers' models arrange fused weights, by model_type
    denoisers      names and joins of denoisers' authors, and what diffusers has for them, by family
    authors        the same for other models, and what transformers has for them
    orders         orders of rows and columns
    numbers        changes of numbers

Comparison, rankings, plans, sweeps and evaluations read the same tables, through quanterr.pairing.
"""
