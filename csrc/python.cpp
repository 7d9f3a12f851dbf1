// An empty Python module: importing it loads this library, whose static initialisers register the operators.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
