"""Classification and generation: an engine's thread, a scheduler, a model runner, models in memory."""
