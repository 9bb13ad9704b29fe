"""Fields of Megatron's TransformerConfig that place the layers on pipeline stages, as in training.megatron_args."""

FIRST_STAGE_LAYERS = "num_layers_in_first_pipeline_stage"
LAST_STAGE_LAYERS = "num_layers_in_last_pipeline_stage"
PIPELINE_LAYOUT = "pipeline_model_parallel_layout"
PLACEMENT_FIELDS = {
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    PIPELINE_LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}
