//! What servers and devices say of disks, as it is sent from the helper to the daemon.

/// [`Facts`], as they are sent.
pub(super) mod nvme {
    use ringway_aio::nvme::Facts;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Words = (u32, u8, [u32; 3], bool);

    pub(in crate::host) fn serialize<S: Serializer>(
        facts: &Option<Facts>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let words = |facts: &Facts| -> Words {
            let most = [facts.max_bytes, facts.discard_blocks, facts.zero_blocks];
            (facts.id, facts.block_shift, most, facts.deallocates_zeroed)
        };
        facts.as_ref().map(words).serialize(to)
    }

    pub(in crate::host) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Facts>, D::Error> {
        let words = Option::<Words>::deserialize(from)?;
        let facts = |(id, block_shift, most, deallocates_zeroed): Words| {
            let [max_bytes, discard_blocks, zero_blocks] = most;
            Facts { id, block_shift, max_bytes, discard_blocks, zero_blocks, deallocates_zeroed }
        };
        Ok(words.map(facts))
    }
}

/// [`Negotiated`], as it is sent.
pub(super) mod remote {
    use ringway_nbd_client::Negotiated;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Words = (u64, u16, [u32; 3], bool);

    pub(in crate::host) fn serialize<S: Serializer>(
        facts: &Option<Negotiated>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let words = |facts: &Negotiated| -> Words {
            let blocks = [facts.min_block, facts.preferred_block, facts.max_block];
            (facts.bytes, facts.flags, blocks, facts.structured)
        };
        facts.as_ref().map(words).serialize(to)
    }

    pub(in crate::host) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Negotiated>, D::Error> {
        let words = Option::<Words>::deserialize(from)?;
        let facts = |(bytes, flags, blocks, structured): Words| {
            let [min_block, preferred_block, max_block] = blocks;
            Negotiated {
                bytes,
                flags,
                min_block,
                preferred_block,
                max_block,
                structured,
                block_status: None,
            }
        };
        Ok(words.map(facts))
    }
}
