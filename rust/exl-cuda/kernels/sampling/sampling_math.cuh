// Logarithm, exponential and power in doubles, operation by operation as in exl-cpu, so that all devices give bitwise identical results.
#pragma once
#include "common/common.cuh"

DEVICE double ln(double x) {
  const long long bits = __double_as_longlong(x);
  long long exponent = (long long)((unsigned long long)bits >> 52) - 1023;
  double m = __longlong_as_double((bits & 0x000fffffffffffffLL) | 0x3ff0000000000000LL);
  if (m > 1.41421356237309504880) m = __dmul_rn(m, 0.5), exponent++;
  const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double z = __dmul_rn(s, s);
  double sum = 0.0;
  for (int k = 11; k >= 0; k--) sum = __dadd_rn(__dmul_rn(sum, z), __ddiv_rn(1.0, (double)(2 * k + 1)));
  const double e = (double)exponent;
  const double low = __dadd_rn(__dmul_rn(__dmul_rn(2.0, s), sum), __dmul_rn(e, 1.9082149292705877e-10));
  return __dadd_rn(__dmul_rn(e, 0.6931471803691238), low);
}

DEVICE double exponential(double x) {
  if (x < -700.0) return 0.0;
  const double n = floor(__dadd_rn(__dmul_rn(x, 1.44269504088896340736), 0.5));
  const double r = __dsub_rn(__dsub_rn(x, __dmul_rn(n, 0.6931471803691238)), __dmul_rn(n, 1.9082149292705877e-10));
  double sum = 1.0;
  for (int k = 14; k >= 1; k--) sum = __dadd_rn(__ddiv_rn(__dmul_rn(sum, r), (double)k), 1.0);
  return __dmul_rn(sum, __longlong_as_double(((long long)n + 1023) << 52));
}

DEVICE double power(double x, double y) {
  if (y == 0.0) return 1.0;
  if (x < 2.2250738585072014e-308) return 0.0;
  return exponential(fmin(__dmul_rn(y, ln(x)), 700.0));
}
