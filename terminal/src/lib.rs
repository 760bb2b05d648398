//! What people read: the log, which can neither fail nor block whoever writes to it, and what
//! commands print.

pub mod logging;
pub mod output;
pub mod reasons;
pub mod short;
pub mod table;
