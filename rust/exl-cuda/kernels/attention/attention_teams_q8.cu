// Attention of one token a sequence over pages of kind q8, in code for sm_80, sm_86 and sm_89.
#include "attention/attention_teams.cuh"

ALL_TEAMS(q8, HADAMARD8, HADAMARD8)
