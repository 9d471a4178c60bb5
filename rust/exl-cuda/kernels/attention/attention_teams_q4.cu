// Attention of one token a sequence over pages of kind q4, in code for sm_80 to sm_89 and from sm_100 on.
#include "attention/attention_teams.cuh"

ALL_TEAMS(q4, HADAMARD4, HADAMARD4)
