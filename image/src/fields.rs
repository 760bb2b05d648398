//! Numbers of a header, as they are in its bytes.

use crate::refused::Refused;

/// Bytes of the shortest header of version 3.
pub(crate) const LENGTH_V3: usize = 104;

/// A field that cannot be.
pub(crate) fn wrong(what: &'static str, value: impl Into<u64>, why: &'static str) -> Refused {
    Refused::Field { what, value: value.into(), why }
}

/// A number of 32 bits, big endian.
pub(crate) fn field(bytes: &[u8], at: usize, what: &'static str) -> Result<u32, Refused> {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map(|bytes| u32::from_be_bytes(*bytes)).ok_or(Refused::Truncated(what))
}

/// A number of 64 bits, big endian.
pub(crate) fn wide(bytes: &[u8], at: usize, what: &'static str) -> Result<u64, Refused> {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.map(|bytes| u64::from_be_bytes(*bytes)).ok_or(Refused::Truncated(what))
}

/// Features, refcount_order and header_length of version 3.
pub(crate) fn newer_fields(
    bytes: &[u8],
    cluster_bits: u32,
) -> Result<([u64; 3], u32, usize), Refused> {
    let features = [
        wide(bytes, 72, "incompatible_features")?,
        wide(bytes, 80, "compatible_features")?,
        wide(bytes, 88, "autoclear_features")?,
    ];
    let order = field(bytes, 96, "refcount_order")?;
    if order > 6 {
        return Err(wrong("refcount_order", order, "a reference count has at most 2^6 bits"));
    }
    let length = field(bytes, 100, "header_length")?;
    let fits = length as usize >= LENGTH_V3 && u64::from(length) <= 1 << cluster_bits;
    if !fits || length % 8 != 0 {
        let why = "it has to be 104 or more, a multiple of 8, and within the first cluster";
        return Err(wrong("header_length", length, why));
    }
    Ok((features, order, length as usize))
}
