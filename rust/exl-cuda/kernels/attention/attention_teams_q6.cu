// Attention of one token a sequence over pages of kind q6, in code for sm_80 to sm_89 and from sm_100 on.
#include "attention/attention_teams.cuh"

ALL_TEAMS(q6, HADAMARD8, HADAMARD4)
