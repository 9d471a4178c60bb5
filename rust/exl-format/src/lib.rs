//! EXL2 and GPTQ bit layouts, and safetensors header checks. No unsafe code, no GPU.
#![forbid(unsafe_code)]
