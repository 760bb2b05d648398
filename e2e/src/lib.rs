//! Tests from outside: real guests and independent clients.
