"""Fuzzing: valid inputs, changed at random, given to whatever reads files that nobody vouches for.

    mutating.py            random changes of bytes and of JSON
    safetensors_bytes.py   a .safetensors file; beside the safetensors library
    gguf_bytes.py          a .gguf file and an importance matrix; beside the gguf library
    pickle_bytes.py        a file of torch.save; beside torch
    onnx_bytes.py          an ONNX model
    folders.py             an index, configurations and labels, and whole comparisons
    stored_reports.py      report.json and thresholds.toml, judged, compared and rendered
    finding.py             what counts as a defect

A target makes an input of a Random and checks it: the check returns what came of it and raises only on a
defect. tests/project/test_fuzz.py runs a few inputs of each; `make fuzz` a million (python -m fuzz, in tests/).
"""
