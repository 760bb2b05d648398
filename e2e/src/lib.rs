//! Tests from outside: real guests and independent clients.

mod files;
pub mod guest;
pub mod qmp;
pub mod xen;
