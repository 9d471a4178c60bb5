// Attention of one token a sequence over pages of kind fp16, in code for sm_80 to sm_89 and from sm_100 on.
#include "attention/attention_teams.cuh"

ALL_TEAMS(fp16, F16, F16)
