// Attention of one token a sequence over pages of kind fp8, in code for sm_80, sm_86 and sm_89.
#include "attention/attention_teams.cuh"

ALL_TEAMS(fp8, E5M2, E5M2)
