// Layout of the structs that the host fills. The compiler checks size and offsets here, and the Rust crate checks its structs against the
// same lines (build/abi.rs reads them, src/abi.rs compares).
#pragma once
#include <cstddef>

#define ABI_SIZE(STRUCT, BYTES) static_assert(sizeof(STRUCT) == BYTES, #STRUCT " differs in size from the Rust struct")
#define ABI_AT(STRUCT, FIELD, OFFSET) \
  static_assert(offsetof(STRUCT, FIELD) == OFFSET, #STRUCT "::" #FIELD " has another offset in the Rust struct")
