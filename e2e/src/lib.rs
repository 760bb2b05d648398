//! Tests from outside: real guests and independent clients.

pub mod guest;
pub mod qmp;
pub mod xen;
