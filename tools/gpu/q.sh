source /work/venv/bin/activate; cd /work/main
FLASH_CUTE_HEAD_DIMS="${1:-64}" FLASH_CUTE_ELEMENTS=bf16 FLASH_CUTE_FAMILIES=sm90 MAX_JOBS=2 python setup.py build_ext --inplace > /tmp/b.txt 2>&1; grep -n "error" /tmp/b.txt | head;python build/gpu/spills.py
