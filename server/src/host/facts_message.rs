//! What was agreed upon with a server, as it is kept in the state folder.

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
