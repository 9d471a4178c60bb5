// Attention of one token a sequence over pages of kind fp16, in code for sm_80, sm_86 and sm_89.
#include "attention/attention_teams.cuh"

ALL_TEAMS(fp16, F16, F16)
