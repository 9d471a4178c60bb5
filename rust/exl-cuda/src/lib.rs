//! CUDA kernels, driver loading and launching.
//!
//! Nothing here links to libcuda, libcudart or libtorch: the driver is opened at run time, and kernels are embedded images. A launch goes
//! to the stream that the caller names, in the primary context that torch uses too. A machine without a GPU gets a [`Reason`].

mod abi;
mod capabilities;
mod device;
mod driver;
mod features;
mod ffi;
pub mod fields;
mod launch;
pub mod layout;
pub mod ops;
mod parameters;
pub mod rows;
pub mod step;

/// The embedded images, written by `build/main.rs`.
pub mod images {
    include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));
}

pub use capabilities::{CARDS, Capabilities, Card, own_arch};
pub use device::{Device, DeviceInfo, devices, launches};
pub use driver::{Driver, Reason};
pub use features::Feature;
pub use launch::{CudaError, Launch, MOST_GRID_ROWS};
