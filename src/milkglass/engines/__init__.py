"""Engines that serve a scrambled model by token ids: vLLM, SGLang, llama.cpp, and Milkglass's own server."""
